"""The notebooks are as they are kept in git, and each runs in a kernel. Kernels of readers: cells in any order."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.kernels import ROOT, error_of, executed, printed

FOLDER = ROOT / "examples" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def _cells(name: str, kind: str = "code") -> list[str]:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


def test_there_are_five() -> None:
    assert len(NAMES) == 5


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_valid_and_has_no_outputs(name: str) -> None:
    transformer = pytest.importorskip("IPython.core.inputtransformer2").TransformerManager()
    code, text = _cells(name), "\n".join(_cells(name, "markdown"))
    for source in code:
        compile(transformer.transform_cell(source), name, "exec")
    # Where the package is installed the cell installs nothing.
    assert code[0].startswith('import importlib.util\n\nif importlib.util.find_spec("xla_adapters") is None:\n    %pip')
    assert "Restart the kernel" in text
    assert any("initialize(" in source and "device.count()" in source for source in code)
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (FOLDER / target).exists(), target
    kept = (FOLDER / f"{name}.ipynb").read_text()
    assert '"outputs": []' in kept
    assert not re.search(r'"outputs": \[[^\]]|"execution_count": [^n]', kept)


_LONG = pytest.mark.long


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("huggingface_finetuning", 1),
        pytest.param("huggingface_finetuning", 8, marks=_LONG),
        pytest.param("lightning", 1, marks=_LONG),
        ("lightning", 8),
        # Makes eight devices itself.
        ("several_devices", None),
        ("trl_lora", 1),
        ("why_is_it_slow", 1),
    ],
)
def test_a_notebook_runs(name: str, devices: int | None) -> None:
    if name == "trl_lora":
        pytest.importorskip("trl")
    code = _cells(name)
    outputs = executed(code, env={"CPU_NUM_DEVICES": str(devices)} if devices else {})
    errors = [f"{source}\n{error_of(output)}" for source, output in zip(code, outputs, strict=True) if error_of(output)]
    assert not errors, errors[0]
    said = "\n".join(map(printed, outputs))
    assert f"{devices or 8} x CPU" in said
    _CHECKS[name](said, outputs)


def _fine_tuned(said: str, outputs: list[Any]) -> None:
    assert float(re.findall(r"accuracy on held-out digits: ([\d.]+)%", said)[0]) > 60
    assert "went on to step 70" in said


def _lightning(said: str, outputs: list[Any]) -> None:
    assert float(re.findall(r"accuracy on the test images: ([\d.]+)%", said)[0]) > 90


def _several(said: str, outputs: list[Any]) -> None:
    (fsdp, dp) = re.findall(r"(?:fsdp|dp) +\[([\d., ]+)\]", said)
    assert [float(one) for one in fsdp.split(",")] == pytest.approx([float(one) for one in dp.split(",")], abs=1e-3)


def _adapted(said: str, outputs: list[Any]) -> None:
    losses = [float(one) for one in re.findall(r"losses \[([\d., ]+)\]", said)[0].split(",")]
    # Of guessing among the characters: 4.6.
    assert losses[-1] < 3.5
    assert "adapter_model.safetensors" in said


def _slow(said: str, outputs: list[Any]) -> None:
    compiles = [int(one) for one in re.findall(r"10 steps, (\d+) compiles", said)]
    assert compiles[0] > 2
    assert compiles[1] == 0
    assert 'where: Cell In[7], line 4 in compute_loss: if outputs["loss"].item() > 10:' in said
    assert re.search(r"traced 12 times: .* it sets Counting.tokens \(Cell In\[9\], line 5\)", said)
    assert int(re.findall(r"12 calls, (\d+) replayed", said)[-1]) > 4


_CHECKS = {
    "huggingface_finetuning": _fine_tuned,
    "lightning": _lightning,
    "several_devices": _several,
    "trl_lora": _adapted,
    "why_is_it_slow": _slow,
}
