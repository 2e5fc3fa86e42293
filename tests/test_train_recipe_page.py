"""train/recipe_page.py as TensorBoard reads it: the recipe's text, the settings compared, their metrics."""

from pathlib import Path

import pytest
import yaml
from drafters import tiny_recipe
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, get_experiment, list_session_groups
from tensorboard.plugins.hparams.backend_context import Context
from torch.utils.tensorboard import SummaryWriter

from recipes.schema import Recipe
from train.recipe_page import METRICS, compared_settings, end_session, recipe_page, show_recipe


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    return tiny_recipe(f"output_dir={tmp_path}", "rounds.count=3")


def texts(recipe: Recipe) -> list[str]:
    events = EventAccumulator(str(recipe.output_dir / "tensorboard")).Reload()
    pages = events.Tensors("recipe/text_summary")
    return [page.tensor_proto.string_val[0].decode() for page in pages]


class HParamsTab:
    """What TensorBoard's own plugin finds below a folder."""

    def __init__(self, logdir: Path) -> None:
        multiplexer = EventMultiplexer().AddRunsFromDirectory(str(logdir)).Reload()
        provider = MultiplexerDataProvider(multiplexer, str(logdir))
        self._found = RequestContext(), Context(TBContext(data_provider=provider, logdir=str(logdir)))

    def metrics(self) -> list[str]:
        request = api_pb2.GetExperimentRequest(include_metrics=True)
        experiment = get_experiment.Handler(*self._found, "id", request).run()
        return [metric.name.tag for metric in experiment.metric_infos]

    def sessions(self) -> list[api_pb2.Session]:
        statuses = [api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_SUCCESS, api_pb2.STATUS_RUNNING]
        params = [api_pb2.ColParams(metric=api_pb2.MetricName(tag=tag)) for tag in METRICS]
        request = api_pb2.ListSessionGroupsRequest(
            allowed_statuses=statuses, col_params=params, slice_size=9, include_metrics=True
        )
        groups = list_session_groups.Handler(*self._found, "id", request).run().session_groups
        self.settings = [dict(group.hparams) for group in groups]
        return [session for group in groups for session in group.sessions]


def draw(recipe: Recipe, points: dict[str, float], step: int) -> None:
    with SummaryWriter(str(recipe.output_dir / "tensorboard"), purge_step=1) as writer:
        for tag, value in points.items():
            writer.add_scalar(tag, value, step)


def test_the_page_is_the_resolved_recipe(recipe):
    show_recipe(recipe)
    (page,) = texts(recipe)
    assert page == recipe_page(recipe)
    assert yaml.safe_load(page.removeprefix("```yaml\n").removesuffix("```\n")) == recipe.model_dump(
        mode="json"
    )


def test_resuming_shows_no_second_page(recipe):
    show_recipe(recipe)
    show_recipe(recipe.model_copy(update={"name": "other"}))
    assert texts(recipe) == [recipe_page(recipe)]


def test_every_setting_that_is_to_be_compared_is_there_as_a_scalar(recipe):
    settings = compared_settings(recipe)
    assert all(isinstance(value, bool | int | float | str) for value in settings.values())
    assert settings["drafter.num_hidden_layers"] == 3
    assert settings["drafter.target_layer_ids"] == "2 4 6"
    assert settings["train.optimizer.learning_rate"] == 4e-3
    assert settings["train.objective.decay"] == 2.5
    assert settings["rounds.count"] == 3
    assert {path.split(".")[0] for path in settings} == {
        "target",
        "drafter",
        "data",
        "train",
        "rounds",
        "eval",
    }


@pytest.mark.parametrize("logdir", [".", "tensorboard"])
def test_the_hparams_tab_shows_settings_and_the_last_of_each_metric(recipe, logdir):
    show_recipe(recipe)
    draw(recipe, {"accept_real/chain": 1.5, "accept_real/tree": 2.0, "accept_sim/chain": 1.75}, step=7)
    draw(recipe, {"accept_real/chain": 2.5, "accept_real/tree": 3.0, "accept_sim/chain": 2.75}, step=9)
    tab = HParamsTab(recipe.output_dir / logdir)
    assert tab.metrics() == list(METRICS)
    (session,) = tab.sessions()
    found = {value.name.tag: (value.training_step, value.value) for value in session.metric_values}
    assert found == {
        "accept_real/chain": (9, 2.5),
        "accept_real/tree": (9, 3.0),
        "accept_sim/chain": (9, 2.75),
    }
    (settings,) = tab.settings
    assert settings.keys() == compared_settings(recipe).keys()
    assert settings["train.steps"].number_value == recipe.train.steps
    assert settings["data.policy"].string_value == "keep"


def test_a_run_is_a_success_once_it_has_ended(recipe):
    show_recipe(recipe)
    (running,) = HParamsTab(recipe.output_dir).sessions()
    assert running.status == api_pb2.STATUS_UNKNOWN
    end_session(recipe)
    (ended,) = HParamsTab(recipe.output_dir).sessions()
    assert ended.status == api_pb2.STATUS_SUCCESS
