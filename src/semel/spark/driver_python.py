"""Makes a local Spark run its Python workers with the driver's own interpreter.

Spark starts `python3` from the PATH unless PYSPARK_PYTHON says otherwise. In a job started as `venv/bin/python job.py`
that is another interpreter, without Semel: Spark then says DATA_SOURCE_NOT_FOUND. On a cluster the driver's path may
not exist on the executors, so nothing is changed there.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

_CONTEXT_MODULES: Final = ("pyspark.core.context", "pyspark.context")
"""Where `SparkContext` is, from pyspark 4.0 on and before."""
_SETTINGS: Final = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
_STARTED_BY_SPARK: Final = "PYSPARK_GATEWAY_PORT"
_CONF_PLACE: Final = 6
"""Of `conf` in the arguments of `SparkContext` after `master`."""
_WRAPPED: Final = "_semel_chooses_python"


def choose_when_spark_starts() -> None:
    """Called by `import semel`, before or after pyspark is imported. Does nothing by itself."""
    for name in _CONTEXT_MODULES:
        if name in sys.modules:
            _wrap_context(sys.modules[name])
            return
    sys.meta_path.insert(0, _WhenLoaded())  # pyright: ignore[reportArgumentType]


def is_local(master: str | None, environment: Mapping[str, str]) -> bool:
    """Whether workers run on this machine; `master` is what the program says.

    >>> is_local("local[2]", {}), is_local("spark://host:7077", {}), is_local(None, {})
    (True, False, True)
    """
    if master is None:
        submitted = re.search(r"(?:--master[= ]|spark\.master=)(\S+)", environment.get("PYSPARK_SUBMIT_ARGS", ""))
        master = submitted[1] if submitted else environment.get("MASTER")
    if master is not None:
        return master.startswith("local")
    return not _has_default_master(environment)


def _has_default_master(environment: Mapping[str, str]) -> bool:
    folder = environment.get("SPARK_CONF_DIR")
    if folder is None and "SPARK_HOME" in environment:
        folder = os.path.join(environment["SPARK_HOME"], "conf")
    if folder is None:
        return False
    try:
        with open(os.path.join(folder, "spark-defaults.conf"), errors="replace") as file:
            text = file.read()
    except FileNotFoundError:
        return False
    return re.search(r"^\s*spark\.master\b", text, re.MULTILINE) is not None


def _choose(master: str | None) -> None:
    is_open = not any(name in os.environ for name in (*_SETTINGS, _STARTED_BY_SPARK))
    if is_open and sys.executable and is_local(master, os.environ):
        os.environ["PYSPARK_PYTHON"] = sys.executable


def _wrap_context(module: ModuleType) -> None:
    """Let a new `SparkContext` choose before it starts the JVM, whose environment decides."""
    context: Any = module.__dict__.get("SparkContext")
    if context is None or hasattr(context, _WRAPPED):
        return
    original: Callable[..., None] = context.__init__

    @wraps(original)
    def __init__(self: Any, master: str | None = None, *args: Any, **kwargs: Any) -> None:
        conf = args[_CONF_PLACE] if len(args) > _CONF_PLACE else kwargs.get("conf")
        _choose(master or (conf.get("spark.master", None) if conf is not None else None))
        original(self, master, *args, **kwargs)

    context.__init__ = __init__
    setattr(context, _WRAPPED, True)


class _WhenLoaded:
    """Finds no module itself; sees that pyspark's is loaded."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in _CONTEXT_MODULES:
            return None
        sys.meta_path.remove(self)  # pyright: ignore[reportArgumentType]
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _wrap_context(module)

        spec.loader.exec_module = exec_module
        return spec
