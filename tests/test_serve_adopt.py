"""serve/adopt.py: a drafter of another project is served as if it were ours."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafters import EMBEDDED_TARGET, TINY_RECIPE, random_weights, tiny_config, write_checkpoint
from safetensors.torch import load_file
from starlette.applications import Starlette
from test_serve_admin import HOLDER, KEY, Engine, ask
from test_serve_formats import IDS, nested_config, old_config, open_spec_config, speculators_config

from recipes.errors import UserError
from serve import adopt as module
from serve.admin import KEY_VARIABLE, AdminRoutes
from serve.adopt import CACHE_VARIABLE, adopt, cache_folder
from serve.checkpoint import check_checkpoint
from serve.plan import Request, make_plan
from serve.show import show_verdict


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return random_weights(tiny_config(), seed=1)


def test_our_own_folder_is_served_itself(tmp_path, weights):
    ckpt = write_checkpoint(tmp_path / "ours", tiny_config(), weights)
    assert adopt(ckpt) == module.Adopted(ckpt)
    assert not cache_folder().exists()


@pytest.mark.parametrize(
    ("make_config", "name"),
    [
        (nested_config, "published"),
        (old_config, "published-old"),
        (speculators_config, "speculators"),
        (open_spec_config, "open-spec"),
    ],
)
def test_another_format_is_served_as_a_copy_that_fits_the_target(tmp_path, weights, make_config, name):
    adopted = adopt(write_checkpoint(tmp_path / "theirs", make_config(), weights))
    assert adopted.format == name
    assert adopted.ckpt.parent == cache_folder()
    written = load_file(adopted.ckpt / "model.safetensors")
    assert all(torch.equal(written[name], weight) for name, weight in weights.items())
    assert check_checkpoint(adopted.ckpt, str(EMBEDDED_TARGET)).target_layer_ids == tuple(IDS)


def test_a_copy_is_made_once_and_anew_when_a_file_changes(tmp_path, weights):
    theirs = write_checkpoint(tmp_path / "theirs", speculators_config(), weights)
    first = adopt(theirs)
    first.ckpt.joinpath("mark").touch()
    assert adopt(theirs) == first
    assert first.ckpt.joinpath("mark").exists()
    write_checkpoint(theirs, speculators_config(), random_weights(tiny_config(), seed=2))
    assert adopt(theirs).ckpt != first.ckpt


def test_two_processes_may_copy_at_once(tmp_path, weights, monkeypatch):
    theirs = write_checkpoint(tmp_path / "theirs", speculators_config(), weights)
    write = module.write_published

    def slower(checkpoint: Any, copy: Any) -> None:
        write(checkpoint, copy)  # another process'
        write(checkpoint, copy)

    monkeypatch.setattr(module, "write_published", slower)
    assert adopt(theirs).ckpt.joinpath("config.json").is_file()


def test_a_drafter_that_cannot_be_served_is_refused_and_nothing_is_copied(tmp_path, weights):
    name = next(iter(weights))
    spoilt = weights | {name: torch.full_like(weights[name], torch.nan)}
    with pytest.raises(UserError, match="values that are not finite"):
        adopt(write_checkpoint(tmp_path / "theirs", speculators_config(), spoilt))
    assert not cache_folder().exists()


def test_what_is_no_drafter_is_left_to_whoever_reads_it(tmp_path):
    assert adopt(tmp_path / "nowhere").ckpt == tmp_path / "nowhere"
    assert adopt(tmp_path).ckpt == tmp_path


def test_the_server_says_what_it_converted(tmp_path, weights, capsys):
    theirs = write_checkpoint(tmp_path / "theirs", speculators_config(), weights)
    plan = make_plan(Request(theirs, TINY_RECIPE, None, None, None))
    assert plan.ckpt == adopt(theirs).ckpt
    show_verdict(plan)
    told = " ".join(capsys.readouterr().out.split())
    assert "converted from the speculators format" in told
    assert "counted from 1: read as" in told


def swap_in(monkeypatch: pytest.MonkeyPatch, ckpt: str) -> tuple[Any, Engine]:
    import httpx  # noqa: PLC0415

    monkeypatch.setenv(KEY_VARIABLE, KEY)
    app = Starlette()
    app.add_middleware(AdminRoutes)
    app.state.engine_client = engine = Engine()
    app.state.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(model="first"))
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")
    return ask(client, "POST", "/admin/drafter", headers=HOLDER, json={"ckpt": ckpt}), engine


def test_a_running_server_takes_another_format_and_tells_how_it_read_it(tmp_path, weights, monkeypatch):
    theirs = write_checkpoint(tmp_path / "theirs", speculators_config(), weights)
    answer, engine = swap_in(monkeypatch, str(theirs))
    assert answer.status_code == 200
    assert answer.json()["format"] == "speculators"
    assert any("counted from 1" in note for note in answer.json()["notes"])
    assert engine.calls[0] == ("swap_drafter", str(adopt(theirs).ckpt))


def test_a_format_that_cannot_be_read_does_not_reach_the_engine(tmp_path, weights, monkeypatch):
    config = {key: value for key, value in speculators_config().items() if "layer_ids" not in key}
    answer, engine = swap_in(monkeypatch, str(write_checkpoint(tmp_path / "theirs", config, weights)))
    assert answer.status_code == 409
    assert "layer_ids" in answer.json()["error"]
    assert not engine.calls
