"""What each participant sees, and how it becomes tokens."""

from .render import Rendered, message_token_ids, message_token_spans, render
from .template import Template, TemplateError, template_of
from .view import View, ViewMessage

__all__ = ["Rendered", "Template", "TemplateError", "View", "ViewMessage", "message_token_ids", "message_token_spans",
           "render",
           "template_of"]  # fmt: skip
