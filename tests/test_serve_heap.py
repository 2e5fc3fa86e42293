"""Python's garbage collector stays away from imports and from what they made."""

import gc

import pytest

from serve.heap import modules_stay


def test_nothing_is_collected_meanwhile():
    with modules_stay():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_was_made_is_not_looked_through_again():
    with modules_stay():
        made = [object()]
    assert not any(each is made for each in gc.get_objects())
    gc.unfreeze()
    assert any(each is made for each in gc.get_objects())


def test_garbage_is_collected_again_after_an_import_that_failed():
    with pytest.raises(ImportError), modules_stay():
        import no_such_module  # noqa: F401, PLC0415
    assert gc.isenabled()
