"""The page that shows models getting faster, and the data behind it. See docs/dashboard.md."""

from hone.dashboard.routes import Dashboard

__all__ = ["Dashboard"]
