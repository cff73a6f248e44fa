"""`python -m <package> COMMAND`: the list of commands, answered at once; everything else is cli.py's."""

import difflib
import sys

COMMANDS = {
    "fit": "check the data, train, then evaluate, export and register the best checkpoint",
    "check": "look for whatever could spoil a run, without training",
    "tune": "try out learning rates, or batch sizes, and say which suits",
    "validate": "measure a checkpoint on the validation split",
    "test": "measure a checkpoint on the test split",
    "predict": "FOLDER: classify a folder of images into a CSV",
    "export": "export a checkpoint to ONNX, prove it equal and measure it",
    "register": "register a checkpoint's export in MLflow",
    "sync": "send what MLflow has not got of earlier runs, because it did not answer",
}


def main() -> None:
    name = f"python -m {__package__}"
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in COMMANDS:
        from .cli import run  # seconds of imports that a list of commands should not cost

        run()
    elif command in ("-h", "--help"):
        print(f"usage: {name} COMMAND [--OPTION VALUE ...]\n")
        print("\n".join(f"  {command:10}{text}" for command, text in COMMANDS.items()))
        print(
            "\nAll but fit, check, tune and sync take --ckpt_path PATH, by default the newest run's best checkpoint.\n"
            f"Options, with their defaults from recipe.yaml: {name} COMMAND --help"
        )
    else:
        close = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"Did you mean {close[0]}?" if close else f"Commands: {', '.join(COMMANDS)}."
        sys.exit(f"{command!r} is no command. {hint}")


if __name__ == "__main__":
    main()
