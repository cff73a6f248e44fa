"""What the command line says: a mistake is answered in three lines, and what is no news is not said."""

import difflib
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from . import PACKAGE, UserError
from .checkpoints import FULL


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


def quiet() -> None:
    """Silence what is no news to the user; everything else stays visible."""
    tips = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    tips.addFilter(lambda record: "Tip:" not in record.getMessage())  # adverts for other products
    for message in (
        ".*does not have many workers.*",  # data in memory is faster without
        ".*isinstance.treespec, LeafSpec.*",  # Lightning's own use of torch
        ".*It is recommended to use .self.log.*sync_dist=True.*",  # torchmetrics has synchronised it already
        ".*Checkpoint directory .* exists and is not empty.*",  # a resumed run goes on in its folder
        ".*ended before the epoch ended and your dataloader is not resumable.*",  # ours is, see resume.py
        ".*You requested to overfit but enabled .*",  # one batch again and again: presets/debug.yaml
        "Image size .* exceeds limit.*",  # such a file is refused, by name
        ".*callbacks used to create the checkpoint need to be provided.*",  # only to train on, not to measure or export
    ):
        warnings.filterwarnings("ignore", message)


@contextmanager
def short_answers() -> Iterator[None]:
    """A user's mistake and a full disk end in one message, a signal in its exit code; all else keeps its traceback."""
    try:
        yield
    except (UserError, MisconfigurationException) as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        if error.errno not in FULL:
            raise
        sys.exit(f"error: {error}. Free room there, or allow writing; then the same command goes on.")
    except SIGTERMException as error:
        sys.exit(error.code or 143)  # 128 + SIGTERM; Lightning 2.6 would report success
    except (KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
            sys.exit(130)  # 128 + SIGINT; Lightning says 1
        raise
