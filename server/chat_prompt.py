"""Renders a conversation into the prompt that the engine gets; knows no route."""

from jaxserve.errors import InvalidRequestError
from jaxserve.text.chat import ChatTemplate, pick_template
from server.conversation import ConversationBody
from server.generation import EncodedPrompt
from server.service import Service


def encode_chat(service: Service, body: ConversationBody) -> EncodedPrompt:
    """Runs the template; call it on a text thread, since a template is a program.

    Raises:
      InvalidRequestError: there is no template, it refuses the conversation, or it would not show the tools.
    """
    tools = body.shown_tools()
    template = _template(service, body)
    if tools and not template.shows_tools:
        raise InvalidRequestError("the chat template does not show tools to the model", param="tools")
    text = template.render(
        [message.for_template() for message in body.messages],
        tools=tools,
        add_generation_prompt=body.opens_new_message,
        continue_final_message=bool(body.continue_final_message),
        **(body.chat_template_kwargs or {}),
    )
    token_ids = service.tokenizer.encode_chat(text)
    return EncodedPrompt(token_ids=token_ids, text=text, is_continued=bool(body.continue_final_message))


def _template(service: Service, body: ConversationBody) -> ChatTemplate:
    if body.chat_template is not None:
        if not service.limits.allow_chat_template:
            raise InvalidRequestError(
                "this server takes no chat template from a request (server.allow_chat_template)", param="chat_template"
            )
        # Not cached: strangers' templates would push out the model's own.
        return ChatTemplate(body.chat_template, special_tokens=service.tokenizer.special_tokens)
    template = pick_template(service.tokenizer, body.shown_tools())
    if template is None:
        raise InvalidRequestError(
            "this model has no chat template; use /v1/completions", param="messages", code="no_chat_template"
        )
    return template
