"""How a mistake on the command line is answered."""

import difflib
import sys
from typing import NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from . import PACKAGE


class Parser(LightningArgumentParser):
    """Answers a mistake in three lines: what is wrong, what may have been meant, where the options are."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        parser = getattr(ex, "subcommand_parser", None) or self
        options = [option for action in parser._actions for option in action.option_strings]
        words = [word.split("=")[0] for word in sys.argv[2:] if word.startswith("--")]
        unknown = [word for word in words if word not in options]
        close = [match for word in unknown for match in difflib.get_close_matches(word, options, n=1)]
        print(f"error: {' '.join(message.split())[:400]}", file=sys.stderr)
        if close:
            print(f"Did you mean {' '.join(close)}?", file=sys.stderr)
        print(f"All options: python -m {PACKAGE.name} {sys.argv[1]} --help", file=sys.stderr)
        sys.exit(2)
