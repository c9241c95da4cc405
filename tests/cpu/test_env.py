"""Environment variables are read when they are asked for."""

from __future__ import annotations

import os

import pytest

from cute_kernels import InvalidArgument, env


def test_a_variable_is_read_when_it_is_asked_for(monkeypatch):
    monkeypatch.delenv(env.VALIDATE.name, raising=False)
    assert not env.VALIDATE.flag()
    os.environ[env.VALIDATE.name] = "1"
    assert env.VALIDATE.flag()
    os.environ[env.VALIDATE.name] = ""
    assert env.VALIDATE.get() == "0" and not env.VALIDATE.flag()
    os.environ[env.VALIDATE.name] = "yes"
    with pytest.raises(InvalidArgument, match=env.VALIDATE.name):
        env.VALIDATE.flag()
    del os.environ[env.VALIDATE.name]
    assert not env.VALIDATE.flag()
