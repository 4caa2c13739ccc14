"""The routes that answer as OpenAI's do."""

from __future__ import annotations

from fastapi import APIRouter

from sessions.service.openai import chat, conversations_routes, models, responses_routes

OPENAI: tuple[APIRouter, ...] = (
    chat.router,
    responses_routes.router,
    conversations_routes.router,
    models.router,
)
