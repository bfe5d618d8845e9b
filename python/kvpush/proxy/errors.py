"""Errors in the form that OpenAI clients understand."""

from __future__ import annotations

from http import HTTPStatus

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True):
    """The inside of an OpenAI error object."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct, frozen=True):
    """An OpenAI error object, as clients receive it."""

    error: ErrorDetail


class RequestError(Exception):
    """A request ends here with an HTTP error of the router's own.

    `status` is the HTTP status, `message` says the cause and the way out, `param` names the field
    at fault.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """Return the JSON body that tells the client."""
        return error_body(self.status, self.message, self.param)


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """Encode an error of the router's own; its type follows from the HTTP status."""
    return msgspec.json.encode(ErrorBody(ErrorDetail(message, _type_of(status), param, status)))


_TYPES: dict[int, str] = {
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


def _type_of(status: int) -> str:
    default = "server_error"
    if HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR:
        default = "invalid_request_error"
    return _TYPES.get(status, default)
