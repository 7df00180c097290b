"""Tools and reasoning: the model's own format of tool calls, the prompt that lists the functions, the grammar of the
answer, and the division of the answer into parts.

- `formats`: reads from the chat template how a model writes tool calls and marks its reasoning;
- `fields`: checks the messages, tools and reasoning of a request;
- `chat`: renders the conversation with the chat template;
- `composition`: combines reasoning, tool calls and the request's own grammar into one grammar;
- `parts`: divides the text of an answer into reasoning, content and tool calls.

Pure: no thread, socket or clock.
"""
