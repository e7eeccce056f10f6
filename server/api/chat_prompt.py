"""Renders a conversation into the prompt that the engine gets; knows no route."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.text.chat import ChatTemplate, pick_template
from jaxserve.text.literal import mark_messages
from server.api.conversation import ConversationBody, Message
from server.api.generation import EncodedPrompt
from server.service import Service


def encode_chat(service: Service, body: ConversationBody) -> EncodedPrompt:
    """The prompt of a chat body; see `encode_messages`."""
    return encode_messages(
        service,
        body.messages,
        tools=body.shown_tools(),
        add_generation_prompt=body.opens_new_message,
        continue_final_message=bool(body.continue_final_message),
        chat_template=body.chat_template,
        variables=body.chat_template_kwargs or {},
    )


def encode_messages(
    service: Service,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> EncodedPrompt:
    """Runs the template; call it on a text thread, since a template is a program.

    Args:
      tools: that the model is told of; None for none.
      chat_template: instead of the checkpoint's own.
      variables: further ones for the template.

    Raises:
      InvalidRequestError: there is no template, it refuses the conversation, or it would not show the tools.
    """
    template = _template(service, chat_template, tools)
    if tools and not template.shows_tools:
        raise InvalidRequestError("the model's chat template has no place for tools", param="tools")
    shown: Sequence[Mapping[str, Any]] = [message.for_template() for message in messages]
    tokenizer = service.tokenizer
    spelled = () if service.limits.special_tokens_in_messages else tokenizer.special_token_texts
    marked = mark_messages(shown, spelled)
    rendered = template.render(
        marked.messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **(variables or {}),
    )
    text, literal_at = marked.unmark(rendered)
    service.check_text("messages", text)
    token_ids = tokenizer.encode_chat(text, literal_at=literal_at)
    return EncodedPrompt(token_ids=token_ids, text=text, is_continued=continue_final_message)


def _template(service: Service, source: str | None, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
    if source is not None:
        if not service.limits.allow_chat_template:
            raise InvalidRequestError(
                "this server takes no chat template from a request (server.allow_chat_template)", param="chat_template"
            )
        # Not cached: strangers' templates would push out the model's own.
        return ChatTemplate(source, special_tokens=service.tokenizer.special_tokens)
    template = pick_template(service.tokenizer, tools)
    if template is None:
        raise InvalidRequestError(
            "this model has no chat template; use /v1/completions", param="messages", code="no_chat_template"
        )
    return template
