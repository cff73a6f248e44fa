"""Prints what to type next, and does nothing else: no network, no git, no installation."""

import json

# The one place where answers enter this file: tojson writes quotes as escapes, so no answer can end the string.
answers = json.loads(r"""{{ cookiecutter | tojson }}""")

print(
    f"Made {answers['__folder']}. Next:\n"
    f"  cd {answers['__folder']}\n"
    "  python -m pip install -e .\n"
    f"  python -m {answers['package_name']} fit"
)
