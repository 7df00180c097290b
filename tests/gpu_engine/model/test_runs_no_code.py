"""Files of a model never run code: pickles that would, and code next to the weights, in every place that reads some.

Not responsible for: files of the hub that are not fetched (see test_hub.py).
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_engine.drafters.heads.eagle3_files import load_head
from gpu_engine.drafters.heads.formats import HeadNotUsable
from gpu_engine.model.adapters.peft_files import AdapterNotSupported, read_adapter
from gpu_engine.model.loaded_model import ModelNotSupported
from gpu_engine.model.loader import load_model
from tests.gpu_engine.harness import config

Saved = Callable[[str], Path]


class Bomb:
    """A value whose unpickling makes a folder."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """Return a path that is there once code of a file has run."""
    return tmp_path / "it-ran"


def write_bomb(path: Path, mark: Path) -> None:
    path.write_bytes(pickle.dumps(Bomb(mark)))


def test_the_bomb_of_these_tests_works(tmp_path: Path, mark: Path) -> None:
    write_bomb(tmp_path / "bomb", mark)
    pickle.loads((tmp_path / "bomb").read_bytes())
    assert mark.is_dir()


def test_a_pickle_of_weights_is_refused_and_one_beside_safetensors_is_not_read(
    tmp_path: Path, mark: Path, saved: Saved
) -> None:
    folder = shutil.copytree(saved("llama"), tmp_path / "model")
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "training_args.bin"):
        write_bomb(folder / name, mark)
    assert load_model(config(model=str(folder))).model_type == "llama"
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotSupported, match="a pickle may run any code when it is read"):
        load_model(config(model=str(folder)))
    assert not mark.exists()


def test_a_pickle_under_the_name_of_a_safetensors_file_is_refused(tmp_path: Path, mark: Path, saved: Saved) -> None:
    folder = shutil.copytree(saved("llama"), tmp_path / "model")
    write_bomb(folder / "model.safetensors", mark)
    with pytest.raises(ModelNotSupported, match=r"^model: .* cannot be loaded: "):
        load_model(config(model=str(folder)))
    assert not mark.exists()


def test_a_pickled_head_is_refused(tmp_path: Path, mark: Path, saved: Saved) -> None:
    target = load_model(config(model=str(saved("llama"))))
    head = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    head |= {"vocab_size": target.net.config.vocab_size}
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}}
    (tmp_path / "config.json").write_text(json.dumps(head | layers))
    write_bomb(tmp_path / "pytorch_model.bin", mark)
    with pytest.raises(HeadNotUsable, match=r"pytorch_model.bin is a pickle"):
        load_head(tmp_path, target.net.config, target.net.dtype)
    assert not mark.exists()


def test_a_pickled_adapter_is_refused(tmp_path: Path, mark: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    write_bomb(tmp_path / "adapter_model.bin", mark)
    with pytest.raises(AdapterNotSupported, match=r"adapter_model.bin is a pickle"):
        read_adapter(tmp_path, 1 << 20)
    assert not mark.exists()


@pytest.mark.parametrize("known", [True, False])
def test_code_beside_a_model_or_its_tokenizer_is_never_run(
    tmp_path: Path, mark: Path, saved: Saved, known: bool
) -> None:
    folder = shutil.copytree(saved("llama"), tmp_path / "model")
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    own = {"AutoConfig": "own.C", "AutoModel": "own.M", "AutoModelForCausalLM": "own.M"}
    for name, more in (("config.json", own), ("tokenizer_config.json", {"AutoTokenizer": ["own.T", "own.T"]})):
        content = json.loads((folder / name).read_text()) | {"auto_map": more}
        if not known and name == "config.json":
            content["model_type"] = "strange"
        (folder / name).write_text(json.dumps(content))
    if known:
        assert load_model(config(model=str(folder))).model_type == "llama"
    else:
        with pytest.raises(ModelNotSupported, match="needs code of its own for its family 'strange'"):
            load_model(config(model=str(folder)))
    assert not mark.exists()
