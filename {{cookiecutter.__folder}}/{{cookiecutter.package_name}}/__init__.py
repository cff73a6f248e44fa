"""A deep-learning project on PyTorch Lightning. Read model.py, data.py and task.py first; cli.py ties them together."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent

# The recipe lies beside the package in a checkout and inside it in an installed wheel; runs go where the project is.
ROOT = PACKAGE.parent if (PACKAGE.parent / "recipe.yaml").is_file() else Path.cwd()


class UserError(Exception):
    """A mistake that the user can mend. The command line prints the message alone, without a traceback."""
