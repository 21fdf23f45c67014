"""Statistics, trace and log settings that cannot be had or changed."""

import pytest

from tests.protocol.wire import accepted, invalid, refused


@pytest.mark.row(65)
@pytest.mark.parametrize("model", ["nothing", "broken"])
def test_statistics_of_an_unknown_model(client, model):
    invalid(client.statistics(model), f"requested model '{model}' is not available")


@pytest.mark.row(65)
def test_statistics_of_an_unknown_version(client):
    invalid(client.statistics("versions", "2"), "requested model version is not available for model 'versions'")


@pytest.mark.row(68)
@pytest.mark.parametrize("model", ["", "add_sub"])
def test_trace_file_cannot_be_changed(client, model):
    answer = client.trace(model, {"trace_file": "/tmp/trace.json"})
    refused(answer, 501, "UNIMPLEMENTED", "can not be updated through network protocol")


@pytest.mark.row(68)
def test_log_file_cannot_be_changed(client):
    answer = client.log({"log_file": "/tmp/log.txt"})
    refused(answer, 501, "UNIMPLEMENTED", "can not be updated through network protocol")


@pytest.mark.row(69)
@pytest.mark.parametrize("settings", [None, {"trace_rate": "10"}])
def test_trace_of_an_unknown_model(client, settings):
    invalid(client.trace("nothing", settings), "Request for unknown model : nothing")


@pytest.mark.parametrize(
    "settings",
    [
        {"nothing": "1"},
        {"trace_rate": "often"},
        {"trace_rate": "-1"},
        {"trace_count": "-2"},
        {"trace_level": ["EVERYTHING"]},
        {"log_frequency": "x"},
        {"trace_rate": ["1", "2"]},
    ],
    ids=str,
)
def test_bad_trace_settings(client, settings):
    before = accepted(client.trace())
    invalid(client.trace("", {"trace_count": "5", **settings}))
    assert accepted(client.trace()) == before, "nothing may be changed by a refused update"


@pytest.mark.parametrize(
    "settings",
    [{"nothing": True}, {"log_info": "yes"}, {"log_verbose_level": True}, {"log_format": "xml"}, {"log_error": 1}],
    ids=str,
)
def test_bad_log_settings(client, settings):
    before = accepted(client.log())
    invalid(client.log({"log_warning": False, **settings}))
    assert accepted(client.log()) == before


@pytest.mark.parametrize("value", [{"a": 1}, 1.5, True, ["x", 1.5]])
def test_trace_settings_of_the_wrong_type(http, value):
    assert http.trace("", {"trace_rate": value}).status == 400
