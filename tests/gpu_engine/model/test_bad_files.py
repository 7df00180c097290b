"""Files that are no model: one line before torch is imported, and the loader says no to each of them as well.

Not responsible for: what only the model shows (see test_reading.py), names of the hub (see test_hub.py).
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_engine.model.files.early import check_files
from gpu_engine.model.hub import find_model
from gpu_engine.model.loader import load_model
from gpu_engine.model.names import ModelNotSupported
from gpu_engine.model.network import ModelFiles
from tests.gpu_engine import gguf_files, tiny
from tests.gpu_engine.harness import config
from tests.gpu_engine.model.recurrent import families, hybrid_gguf_files

Saved = Callable[[str], Path]
Tensors = dict[str, Any]
Change = Callable[[Tensors], None]
"""Changes the tensors of a file."""

ALIKE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")
"""Families whose tensors are known without torch, in both formats."""


def refusal(path: Path) -> str:
    """Return what is said before torch is imported; "": nothing."""
    try:
        check_files(path, "model")
    except ModelNotSupported as error:
        said = str(error)
    else:
        return ""
    assert "\n" not in said
    return said


def is_refused_by_the_loader(path: Path) -> bool:
    try:
        load_model(config(model=str(path)))
    except ModelNotSupported as error:
        said = str(error)
    else:
        return False
    assert "\n" not in said
    return True


def rewritten(source: Path, file: Path, change: Change, **keys: int) -> Path:
    """Write a GGUF file with other tensors, and with other numbers in its header; return it."""
    reader = gguf.GGUFReader(source)
    arch = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(file, arch)
    changed = {f"{arch}.{key.replace('__', '.')}": value for key, value in keys.items()}
    for key, held in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            of = held.types[-1] if held.types[0] is gguf.GGUFValueType.ARRAY else None
            value = held.contents() if isinstance(held.contents(), list) else changed.get(key, held.contents())
            writer.add_key_value(key, value, held.types[0], of)
    tensors: Tensors = {tensor.name: tensor for tensor in reader.tensors}
    change(tensors)
    for name, tensor in tensors.items():
        if isinstance(tensor, np.ndarray):
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def resaved(source: Path, folder: Path, change: Change, **keys: Any) -> Path:
    """Write a folder with other tensors, and with other values in its `config.json`; return it."""
    shutil.copytree(source, folder)
    (file,) = folder.glob("*.safetensors")
    tensors: Tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, **keys}))
    return folder


def _keep(tensors: Tensors) -> None:
    """Change no tensor."""


nothing: Change = _keep


def without(name: str) -> Change:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def of_another_shape(name: str) -> Change:
    """Return the change to a tensor with one more output, or with half of its inputs."""

    def change(tensors: Tensors) -> None:
        tensor = tensors[name]
        if isinstance(tensor, torch.Tensor):
            tensors[name] = torch.zeros(len(tensor) + 1, *tensor.shape[1:])
        else:
            tensors[name] = np.zeros([int(size) for size in tensor.shape[:-1]] + [int(tensor.shape[-1]) * 2], "f4").T

    return change


def with_more(name: str) -> Change:
    def change(tensors: Tensors) -> None:
        some = next(iter(tensors.values()))
        tensors[name] = torch.zeros(8) if isinstance(some, torch.Tensor) else np.zeros(8, np.float32)

    return change


@pytest.mark.parametrize("family", gguf_files.FAMILIES)
def test_no_valid_gguf_file_is_refused(tmp_path: Path, family: str) -> None:
    for kinds in (["F32"], ["Q8_0", "Q4_1"]):
        assert not refusal(gguf_files.write(gguf_files.FAMILIES[family](), tmp_path / "model.gguf", kinds))


@pytest.mark.parametrize("family", hybrid_gguf_files.FAMILIES)
def test_no_valid_file_of_a_hybrid_is_refused(tmp_path: Path, family: str) -> None:
    net = families.tiny(hybrid_gguf_files.FAMILIES[family])
    file = hybrid_gguf_files.write(net, family, tmp_path / "model.gguf")
    assert not refusal(file)
    endless = refusal(rewritten(file, tmp_path / "endless.gguf", nothing, block_count=2**32 - 1))
    assert "it has 4294967295 layers by its configuration, and " in endless
    fields = gguf.GGUFReader(file).fields
    if family != "nemotron_h":  # the number of its layers is the length of lists
        (key,) = [key for key in fields if key.endswith(".block_count")]
        layers = int(fields[key].contents()) + 1
        more = refusal(rewritten(file, tmp_path / "more.gguf", nothing, block_count=layers))
        assert "it has no tensor of the layer blk." in more
    lost = refusal(rewritten(file, tmp_path / "lost.gguf", without("token_embd.weight")))
    assert lost.endswith("it has no token_embd.weight")


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.OWN_FORWARD])
def test_no_valid_folder_is_refused(saved: Saved, family: str) -> None:
    assert not refusal(saved(family))


@pytest.mark.parametrize("family", [*ALIKE[-2:], *(pytest.param(f, marks=pytest.mark.slow) for f in ALIKE[:-2])])
def test_each_lost_or_wrong_tensor_is_told_at_once(tmp_path: Path, saved: Saved, family: str) -> None:
    """Both formats: a tensor of a layer, and one outside of the layers."""
    file = gguf_files.write(gguf_files.FAMILIES[family](), tmp_path / "model.gguf")
    for name in [tensor.name for tensor in gguf.GGUFReader(file).tensors]:
        wrong = refusal(rewritten(file, tmp_path / "wrong.gguf", of_another_shape(name)))
        # The header of a Qwen 3 does not say the size of its heads, so another tensor may be the one that is named.
        assert name in wrong or (family == "qwen3" and wrong)
        lost = refusal(rewritten(file, tmp_path / "lost.gguf", without(name)))
        assert f"it has no {name}" in lost or name == "output.weight"  # the embedding takes its place
    folder = saved(family)
    for at, name in enumerate(load_file(folder / "model.safetensors")):
        told = [refusal(resaved(folder, tmp_path / f"wrong{at}", of_another_shape(name)))]
        told += [refusal(resaved(folder, tmp_path / f"lost{at}", without(name)))]
        assert all(name in line or not line for line in told)
        assert all(told) or name.endswith(("sinks", "rotary_emb.inv_freq")), name


GGUF = [*gguf_files.FAMILIES, *hybrid_gguf_files.FAMILIES]


@pytest.mark.parametrize("family", [*GGUF[::2], *(pytest.param(f, marks=pytest.mark.slow) for f in GGUF[1::2])])
def test_the_loader_refuses_what_is_refused_at_once(tmp_path: Path, family: str) -> None:
    """Random changes to a valid file."""
    if family in gguf_files.FAMILIES:
        file = gguf_files.write(gguf_files.FAMILIES[family](), tmp_path / "model.gguf", ["F32"])
    else:
        net = families.tiny(hybrid_gguf_files.FAMILIES[family])
        file = hybrid_gguf_files.write(net, family, tmp_path / "model.gguf")
    draw = random.Random(family)
    names = [tensor.name for tensor in gguf.GGUFReader(file).tensors]
    told = 0
    for at in range(8):
        some, keys, change = draw.choice(names), dict[str, int](), nothing
        if at == 1:  # which is told of every family
            change = without("token_embd.weight")
        elif at % 4 == 0:
            key = draw.choice(["block_count", "embedding_length", "feed_forward_length", "attention__head_count"])
            keys = {key: draw.choice([1, 2, 3, 8])}
        elif at % 4 == 1:
            change = with_more(draw.choice(["blk.0.attn_q.bias", "blk.1.attn_norm.bias", "blk.1.more.weight", "more"]))
        else:
            change = draw.choice([without, of_another_shape])(some)
        path = rewritten(file, tmp_path / "changed.gguf", change, **keys)
        if refusal(path):
            told += 1
            assert is_refused_by_the_loader(path), (some, at, refusal(path))
    assert told >= (2 if family in gguf_files.FAMILIES else 1)


@pytest.mark.parametrize("family", ALIKE)
def test_the_loader_refuses_the_folders_that_are_refused_at_once(tmp_path: Path, saved: Saved, family: str) -> None:
    draw, folder, told = random.Random(family), saved(family), 0
    names = [*load_file(folder / "model.safetensors")]
    for at in range(6):
        keys = dict[str, Any]()
        if at % 3 == 0:
            key = draw.choice(["hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "head_dim"])
            keys = {key: draw.choice([-1, 0, 1, 32, 128])}
        changes = [nothing] if keys else [without(draw.choice(names)), of_another_shape(draw.choice(names))]
        path = resaved(folder, tmp_path / f"{at}", draw.choice(changes), **keys)
        if refusal(path):
            told += 1
            assert is_refused_by_the_loader(path), (at, keys, refusal(path))
    assert told >= 2


def test_damaged_files_are_told_without_torch(tmp_path: Path, saved: Saved) -> None:
    """Each line as a server says it, seconds before it has imported torch."""
    file = gguf_files.write(gguf_files.FAMILIES["llama"](), tmp_path / "model.gguf")
    whole, vocabulary = file.read_bytes(), b"tokenizer.ggml.tokens"
    assert whole.count(b"llama.block_count") == 1
    made = {
        "empty.gguf": (b"", "its header is damaged, or ends too early"),
        "less.gguf": (whole[:900], "its header is damaged, or ends too early"),
        "half.gguf": (whole[: len(whole) // 2], "blk.0.ffn_down.weight ends at byte"),
        "magic.gguf": (b"XXXX" + whole[4:], "it does not begin with the four bytes GGUF"),
        "family.gguf": (whole.replace(b"llama", b"lxama"), "its architecture is 'lxama', which is not known"),
        "other.gguf": (whole.replace(b"llama", b"rwkv7"), "its architecture is 'rwkv7', which is not served"),
        "lost.gguf": (whole.replace(b"blk.1.ffn_up", b"blk.1.ffn_xx"), "it has no blk.1.ffn_up.weight, which other"),
        "none.gguf": (whole.replace(b"blk.0.ffn_up", b"blk.0.ffn_xx"), "it has no blk.0.ffn_up.weight, which other"),
        "words.gguf": (whole.replace(vocabulary, vocabulary[:-1] + b"x"), "it has no tokenizer.ggml.tokens"),
    }
    for name, (content, _) in made.items():
        (tmp_path / name).write_bytes(content)
    whole_ones = ("family.gguf", "other.gguf")
    lines = {
        name: ("cannot be loaded: " if name in whole_ones else "cannot be read; is it complete? ") + wanted
        for name, (_, wanted) in made.items()
    }
    cut = resaved(saved("llama"), tmp_path / "cut", nothing) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-10])
    resaved(saved("llama"), tmp_path / "kind", nothing, model_type="zzz")
    resaved(saved("llama"), tmp_path / "layers", nothing, num_hidden_layers=-1)
    resaved(saved("llama"), tmp_path / "many", nothing, num_hidden_layers=2**31)
    resaved(saved("llama"), tmp_path / "nested", nothing, text_config={"n_layer": 10**6})
    resaved(saved("llama"), tmp_path / "number", nothing, architectures=5)
    resaved(saved("llama"), tmp_path / "list", nothing, model_type=["llama"])
    resaved(saved("llama"), tmp_path / "empty", nothing)
    (tmp_path / "empty" / "model.safetensors").unlink()
    lines |= {
        "cut": "cannot be read; is it complete? model.safetensors is no complete safetensors file: it ends at byte",
        "kind": "is of the family 'zzz', which is not known here",
        "layers": "cannot be read; is it complete? it has -1 layers by its configuration",
        "many": "cannot be read; is it complete? it has 2147483648 layers by its configuration, and 2",
        "nested": "cannot be read; is it complete? it has 1000000 layers by its configuration, and 2",
        "number": "cannot be read; is it complete? 'int' object is not iterable",
        "list": "cannot be read; is it complete? ",
        "empty": "cannot be read; is it complete? the folder has no safetensors file",
    }
    code = (
        "import sys; from gpu_engine.model.files.early import check_files; from pathlib import Path\n"
        "for name in sys.argv[1:]:\n"
        "    try: check_files(Path(name), 'model'); print('nothing')\n"
        "    except ValueError as error: print(error)\n"
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, *(str(tmp_path / name) for name in lines), str(file)]
    *told, last = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.splitlines()
    assert last == "nothing"
    for (name, wanted), line in zip(lines.items(), told, strict=True):
        assert line.startswith(f"model: {tmp_path / name} {wanted}"), line


def test_a_draft_model_is_looked_at_as_well(tmp_path: Path) -> None:
    file = gguf_files.write(gguf_files.FAMILIES["llama"](), tmp_path / "model.gguf")
    endless = rewritten(file, tmp_path / "endless.gguf", nothing, block_count=2**32 - 1)
    find_model(config(model=str(file), drafter="model", draft_model=str(file)))
    with pytest.raises(ModelNotSupported, match=rf"^draft_model: {endless} cannot be read; .* 4294967295 layers"):
        find_model(config(model=str(file), drafter="model", draft_model=str(endless)))
    # One that a request names, while an engine serves.
    assert ModelFiles.open(file, "path", torch.float32, beside=True).header is not None
    with pytest.raises(ModelNotSupported, match=rf"^path: {endless} cannot be read; .* 4294967295 layers"):
        ModelFiles.open(endless, "path", torch.float32, beside=True)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"hidden_act": "zz"}, "its configuration describes no model: KeyError: 'zz'"),
        ({"model_type": "t5"}, "transformers has no model that continues a text in the family t5"),
    ],
)
def test_a_configuration_of_no_model_is_refused_in_one_line(
    tmp_path: Path, saved: Saved, changed: dict[str, Any], words: str
) -> None:
    folder = resaved(saved("llama"), tmp_path / "model", nothing, **changed)
    with pytest.raises(ModelNotSupported, match=rf"^model: {folder} cannot be loaded: {words}$"):
        load_model(config(model=str(folder)))


def test_a_damaged_vocabulary_is_refused_in_one_line(tmp_path: Path, saved: Saved) -> None:
    file = gguf_files.write(gguf_files.FAMILIES["llama"](), tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes().replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.mergex"))
    with pytest.raises(ModelNotSupported, match=rf"^model: {file} cannot be read; is the file complete\? KeyError: "):
        load_model(config(model=str(file)))
    folder = resaved(saved("llama"), tmp_path / "model", nothing)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "none"}}')
    with pytest.raises(ModelNotSupported, match=r"^model: the tokenizer of \S+ cannot be loaded: [^\n]+$"):
        load_model(config(model=str(folder)))
