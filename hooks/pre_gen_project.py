"""Refuses bad answers before anything is written: all of them at once, one ASCII line each.

Cookiecutter renders answers from the command line or a configuration file as Jinja before a template has a say, so no
hook can keep an expression in them from being evaluated by the person who typed it. But here it is seen as it was typed
and refused. What is typed at a prompt is never evaluated.
"""

import json
import keyword
import re
import sys
import unicodedata

LICENSES = ("MIT", "Apache-2.0", "BSD-3-Clause", "Proprietary")

# Built from single characters, because this file is a Jinja template itself.
TEMPLATE_MARKS = ["{" + mark for mark in ("{", "%", "#")] + [mark + "}" for mark in ("}", "%", "#")]

# Line breaks, marks that show text in another order than it has, and what YAML can't hold. The joiner within emoji
# (U+200D) and right-to-left letters are fine.
UNSAFE_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")
UNSAFE_CHARACTERS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff\ufffe\uffff"

# Folders and files of a project and of the tools around it: a package of that name would mix with them.
PROJECT_NAMES = """
bin build cache checkpoints conftest contract data demo dist docs env export exports lib license logs mlruns notebooks
package presets project pyproject readme recipe requirements runs scripts setup src test tests venv
"""

# Modules of the standard library that only some supported versions of Python have.
OTHER_PYTHONS = """
aifc annotationlib asynchat asyncore audioop binhex cgi cgitb chunk compression crypt distutils imghdr imp lib2to3
mailcap msilib nis nntplib ossaudiodev pipes smtpd sndhdr spwd sunau telnetlib tomllib uu xdrlib
"""

# What the project's dependencies, all the way down, and its tools are imported or installed as: a package of that name
# would be imported in their place. A test compares this with what is installed.
DEPENDENCIES = """
aiohappyeyeballs aiohttp aiosignal alembic annotated_doc annotated_types anyio ast_serialize async_timeout attr attrs
backports blinker build cachetools certifi cffi charset_normalizer click cloudpickle colorama coloredlogs contourpy
cryptography cuda cuda_bindings cuda_pathfinder cuda_toolkit cycler databricks databricks_sdk dateutil docker
docstring_parser dotenv editables exceptiongroup fastapi filelock flask flask_cors flatbuffers fonttools frozenlist
fsspec functorch git gitdb gitpython google google_auth graphene graphql graphql_core graphql_relay greenlet gunicorn
h11 hatchling huey humanfriendly idna importlib_metadata importlib_resources iniconfig ipython isympy itsdangerous
jinja2 joblib jsonargparse kiwisolver librt lightning lightning_fabric lightning_utilities mako markupsafe matplotlib
ml_dtypes mlflow mlflow_skinny mlflow_tracing mpl_toolkits mpmath multidict mypy mypy_extensions mypyc narwhals
networkx numpy nvidia nvidia_cublas nvidia_cuda_cupti nvidia_cuda_nvrtc nvidia_cuda_runtime nvidia_cudnn_cu13
nvidia_cufft nvidia_cufile nvidia_curand nvidia_cusolver nvidia_cusparse nvidia_cusparselt_cu13 nvidia_nccl_cu13
nvidia_nvjitlink nvidia_nvshmem_cu13 nvidia_nvtx omegaconf onnx onnx_ir onnxruntime onnxscript opentelemetry
opentelemetry_api opentelemetry_proto opentelemetry_sdk opentelemetry_semantic_conventions optuna packaging pandas
pathspec pil pillow pip pkg_resources pluggy prettytable propcache protobuf py pyarrow pyasn1 pyasn1_modules pycparser
pydantic pydantic_core pygments pylab pyparsing pyproject_hooks pytest python_dateutil python_dotenv pytorch_lightning
pytz pyyaml requests rich ruff scikit_learn scipy setuptools simplejpeg six sklearn skops smmap sqlalchemy sqlparse
starlette sympy tensorboard tensorboardx threadpoolctl tomli tomlkit torch torchaudio torchgen torchmetrics torchvision
tqdm transformers triton trove_classifiers typeshed_client typing_extensions typing_inspection tzdata urllib3 uvicorn
waitress wandb wcwidth werkzeug wheel yaml yarl zipp
"""

# Names that Windows keeps for devices.
DEVICES = "con prn aux nul " + " ".join(f"com{n} lpt{n}" for n in range(10))


def package_name_problem(name: str) -> str | None:
    """What is wrong with a package name and what would do, or None."""
    if not re.fullmatch("[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        return "can't be imported as is; use a-z, 0-9 and single underscores between them, a letter first: my_project"
    if len(name) > 50:
        return "is longer than 50 characters; shorten it"
    add_a_word = f"; add a word: my_{name}"
    if keyword.iskeyword(name) or name in ("case", "match", "type"):
        return "is a keyword of Python" + add_a_word
    if name in sys.stdlib_module_names or name in OTHER_PYTHONS.split():
        return "would hide a module of Python's standard library" + add_a_word
    if name in DEPENDENCIES.split():
        return "would hide a package that the project needs" + add_a_word
    if name in PROJECT_NAMES.split():
        return "is a folder or file that projects use" + add_a_word
    if name in DEVICES.split():
        return "can't be a folder on Windows" + add_a_word
    return None


def text_problem(text: str) -> str | None:
    """What is wrong with a text for people and what would do, or None."""
    if not text.strip():
        return "is empty; write at least one character"
    if len(text) > 100:
        return "is longer than 100 characters; shorten it"
    if any(unicodedata.category(c) in UNSAFE_CATEGORIES or c in UNSAFE_CHARACTERS for c in text):
        return "holds a control character; write one line of visible characters"
    if text != text.strip():
        return "starts or ends with a blank; leave it out"
    if any(mark in text for mark in TEMPLATE_MARKS):
        return "holds a mark of the template language; leave out braces next to each other, % or #"
    return None


def problems(answers: dict, typed: dict) -> list[str]:
    """One ASCII line for each bad answer. `typed` holds the answers as they were before Cookiecutter rendered them."""
    found = []
    for key in ("project_name", "author_name"):
        text = str(typed.get(key, answers[key]))
        if not text_problem(text):
            text = answers[key]
        if problem := text_problem(text):
            found.append(f"{key} {text!a} {problem}")
    package_name = answers["package_name"]
    if problem := package_name_problem(package_name):
        found.append(f"package_name {package_name!a} {problem}")
    elif answers["__folder"] != package_name.replace("_", "-"):
        found.append(f"__folder {answers['__folder']!a} follows from package_name; leave it out")
    if answers["license"] not in LICENSES:
        found.append(f"license {answers['license']!a} is not on offer; choose from {', '.join(LICENSES)}")
    return found


if __name__ == "__main__":
    # The one place where answers enter this file: tojson writes quotes as escapes, so no answer can end the string.
    answers, typed = json.loads(r"""{{ [cookiecutter, _cookiecutter | default({})] | tojson }}""")
    if found := problems(answers, typed):
        sys.exit("\n".join(found))
