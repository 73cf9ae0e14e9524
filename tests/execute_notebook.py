"""Executes notebook.ipynb from top to bottom and compares outputs.

    python tests/execute_notebook.py

puts the outputs of a fresh execution into notebook.ipynb: after a change of the notebook, or of
what it shows.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from itertools import zip_longest
from pathlib import Path

import nbformat
from conftest import ROOT, clean_environment
from nbclient import NotebookClient

NOTEBOOK = ROOT / "notebook.ipynb"
VARIES = "varies"  # tag of a cell that prints times, paths, versions or rounding errors
TIMEOUT_S = 200  # of a cell
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


def execute(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """A copy of the notebook with fresh outputs, executed in `folder`, beside copies of the code.

    Raises `CellExecutionError` when a cell fails, which ends the execution.
    """
    notebook = nbformat.from_dict(notebook)
    shutil.copy(ROOT / "llm_ddp_parallel_training.py", folder)
    shutil.copytree(ROOT / "labs", folder / "labs")
    client = NotebookClient(
        notebook, timeout=TIMEOUT_S, kernel_name="python3", record_timing=False,
        coalesce_streams=True, resources={"metadata": {"path": str(folder)}},
    )  # fmt: skip
    client.execute(env=clean_environment())
    notebook.metadata.language_info = {"name": "python"}  # without the version
    return notebook


def differences(committed: nbformat.NotebookNode, fresh: nbformat.NotebookNode) -> list[str]:
    """What the outputs of two executions do not have in common, a line each.

    Words must be the same, and so must whole numbers. Of a number with decimals the last printed
    digit may differ by one: another processor adds up in another order. Of pictures only their
    being there is compared, and so it is with all outputs of a cell that is tagged `varies`.
    Warnings (standard error) depend on versions and are left out.
    """
    found = []
    for old, new in zip_longest(code_cells(committed), code_cells(fresh)):
        if old is None or new is None or old.source != new.source:
            return [f"cell {(old or new).id}: only in one of the two, or changed"]
        kinds = [{kind for kind, _ in outputs(cell)} for cell in (old, new)]
        if kinds[0] != kinds[1]:
            found.append(f"cell {old.id}: {sorted(kinds[0])} became {sorted(kinds[1])}")
        elif VARIES not in old.metadata.get("tags", []):
            texts = ["\n".join(text for _, text in outputs(cell)) for cell in (old, new)]
            for before, after in zip_longest(*(text.splitlines() for text in texts), fillvalue=""):
                if not alike(before, after):
                    found.append(f"cell {old.id}: {before!r} became {after!r}")
    return found


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(cell: nbformat.NotebookNode) -> list[tuple[str, str]]:
    """(kind, text) of a cell's outputs but for warnings; the text of a picture is empty."""
    found = []
    for output in cell.outputs:
        if output.output_type == "stream":
            found += [("text", output.text)] if output.name == "stdout" else []
        elif "image/png" in output.get("data", {}):
            found.append(("picture", ""))
        else:
            found.append((output.output_type, output.get("data", {}).get("text/plain", "")))
    return found


def alike(before: str, after: str) -> bool:
    """Whether two lines say the same, but for the last digit of numbers with decimals."""
    if NUMBER.split(before) != NUMBER.split(after):
        return False
    for a, b in zip(NUMBER.findall(before), NUMBER.findall(after)):
        decimals = len(a.partition(".")[2])
        a, b = (float(x.replace(",", "")) for x in (a, b))
        if abs(a - b) > (1.01 * 10**-decimals if decimals else 0):
            return False
    return True


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        fresh = execute(nbformat.read(NOTEBOOK, as_version=4), Path(folder))
    nbformat.write(fresh, NOTEBOOK)
    print(f"{NOTEBOOK.name}: {NOTEBOOK.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
