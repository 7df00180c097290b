"""Tools and reasoning: the model's own format of tool calls, the prompt that shows the functions, the grammar of the
answer, and the answer in parts.

- `formats`: how a model writes tool calls and where it thinks, read from its chat template;
- `fields`: checks of the request's messages, tools and reasoning;
- `chat`: the conversation as the chat template's text;
- `composition`: one grammar of reasoning, tool calls and the request's own grammar;
- `parts`: the text of an answer as reasoning, content and tool calls.

Pure: no thread, socket or clock.
"""
