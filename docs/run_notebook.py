"""Run a notebook and store its outputs, without the progress on stderr.

pip install nbclient ipykernel
python -m docs.run_notebook docs/tutorials/any_model.ipynb FOLDER        # the cells run in FOLDER
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def main(path: Path, folder: Path) -> None:
    """Run the cells in a folder, and write the notebook."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
