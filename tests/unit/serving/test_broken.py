"""A server that only a restart can mend says so to whoever asks for its health, and goes on answering."""

from __future__ import annotations

from types import SimpleNamespace

from hone.serving.service import InferenceService


def test_a_server_that_a_restart_would_mend_is_neither_live_nor_ready():
    told = SimpleNamespace(reason="")
    registry = SimpleNamespace(all_ready=lambda: True, served=list)
    service = InferenceService(
        server_name="hone",
        registry=registry,
        lifecycle=None,
        regions=None,
        log_control=None,
        trace_control=None,
        tracer=None,
        control_mode="none",
        strict_readiness=True,
        ready_requires_model=False,
        known_names=list,
        broken=lambda: told.reason,
    )
    assert (service.live(), service.ready()) == (True, False)
    service.start()
    assert (service.live(), service.ready(), service.broken) == (True, True, "")
    told.reason = "the GPU is lost"
    assert (service.live(), service.ready(), service.broken) == (False, False, "the GPU is lost")
