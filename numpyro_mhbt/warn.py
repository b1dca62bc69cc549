"""Warnings that name the line of the user, not one of ours."""

from __future__ import annotations

from collections.abc import Iterator
import os
import sys
import threading
from types import FrameType
import warnings

import jax
import numpyro

_OWN = os.path.dirname(__file__) + os.sep
_NUMPYRO = os.path.dirname(numpyro.__file__) + os.sep
_WITHIN = (_OWN, _NUMPYRO, os.path.dirname(jax.__file__) + os.sep)


def warn(text: str) -> None:
    """
    A ``UserWarning`` at the line outside of this package that led here.

    JAX calls the host from threads of its own, whose stacks end there: then it is the
    line of a thread that is inside NumPyro, or else where the main thread is, since
    JAX lets it go on before a run is over.
    """
    here = sys._getframe()
    frame = next(filter(None, map(_caller, _stacks(here))), here)
    warnings.warn_explicit(
        f"MHBT: {text}",
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        # Where Python notes what it has said already, once for each line.
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _stacks(here: FrameType) -> Iterator[FrameType]:
    """The innermost frames of threads, the likeliest to be the user's first."""
    yield here
    others = sys._current_frames()
    del others[threading.get_ident()]
    main = others.get(threading.main_thread().ident or 0)
    stacks = sorted(others.values(), key=lambda frame: frame is not main)
    yield from (frame for frame in stacks if _is_inside(frame))
    if main is not None:
        yield main


def _is_inside(frame: FrameType) -> bool:
    """Whether a thread is at work for NumPyro, and not one of ours that reads files."""
    return any(f.f_code.co_filename.startswith(_NUMPYRO) for f in _outwards(frame))


def _caller(frame: FrameType) -> FrameType | None:
    """The first frame of a stack that is of none of the packages, if any."""
    outside = (
        f for f in _outwards(frame) if not f.f_code.co_filename.startswith(_WITHIN)
    )
    return next(outside, None)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
