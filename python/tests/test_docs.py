"""The programs of docs/from-python.md and of README.md run."""

import importlib.util
import pathlib
import re

import numpy
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def blocks(file):
    found = re.findall(r"(?ms)^```python\n(.*?)^```", (ROOT / file).read_text(encoding="utf-8"))
    assert found, f"{file} has no programs"
    return [pytest.param(block, id=f"{file} {number}") for number, block in enumerate(found)]


def run(block, **names):
    """Runs a program; returns its names."""
    for module in ("torch", "transformers"):
        if re.search(rf"(import|from) {module}\b", block) and importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    if "from_pretrained(name" in block:
        names["name"] = a_model(names.pop("folder"))
    exec(compile(block, "program", "exec"), names)
    return names


def a_model(folder):
    """A folder with a small model, which `from_pretrained` loads."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("block", blocks("docs/from-python.md"))
def test_from_python(block, tmp_path):
    names = run(block, folder=tmp_path)
    if "model" in names:
        assert names["model"].config._attn_implementation == "flashtile"


@pytest.mark.parametrize("block", blocks("python/README.md"))
def test_readme(block, tmp_path):
    import flashtile

    # The names that the text around a program describes.
    q, kv = numpy.ones((41, 16, 64), numpy.float32), numpy.ones((41, 8, 64), numpy.float32)
    names = run(block, folder=tmp_path, flashtile=flashtile, q=q, k=kv, v=kv)
    if "out" in names:
        assert names["out"].shape in [(1, 32, 128, 64), (41, 16, 64)]
