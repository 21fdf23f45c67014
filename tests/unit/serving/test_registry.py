"""What other threads may ask of the registry while the event loop changes it."""

from __future__ import annotations

from hone.serving.registry import ModelRegistry


def test_models_may_come_while_another_thread_lists_them():
    registry = ModelRegistry()

    class Meanwhile(dict):
        def values(self):
            registry.ensure("another")
            return super().values()

    registry.publish("m", Meanwhile())
    registry.publish("n", Meanwhile())
    assert list(registry.served()) == []
    assert registry.names() == ["another", "m", "n"]
