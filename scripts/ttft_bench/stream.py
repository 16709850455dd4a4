"""One request whose answer is streamed, to see when its first token arrives."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cpu_engine.server import CpuServer, Generation, ServerError

TIMEOUT = 180.0


@dataclass(frozen=True)
class Streamed:
    """first: seconds from before the connection is made until an answer with a token has arrived.

    waited: seconds for which SGLang says that its scheduler held the request back for the storage.
    """

    first: float
    waited: float
    generation: Generation


def ask(server: CpuServer, prompt: Sequence[int], new_tokens: int) -> Streamed:
    """Greedy completion of token ids with log probabilities, streamed.

    Raises `ServerError` if the server answers with an error, with nothing, or not at all.
    """
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        "return_logprob": True,
        "stream": True,
    }
    text = json.dumps(body)
    first, last = None, None
    started = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT)
    try:
        connection.request("POST", "/generate", text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise _failure(server, f"answered {response.status}: {response.read()[:500]!r}")
        while line := response.readline():
            if not line.startswith(b"data: {"):
                continue  # between events, or "[DONE]"
            first = first or time.perf_counter() - started
            last = json.loads(line[len(b"data: ") :])
            if "error" in last:
                raise _failure(server, f"answered {last['error']}")
    except (OSError, http.client.HTTPException) as error:
        raise _failure(server, f"failed with {error!r}") from error
    finally:
        connection.close()
    if first is None or last is None:
        raise _failure(server, "ended without a token")
    generation = Generation.from_response(last, time.perf_counter() - started)
    return Streamed(first, last["meta_info"]["storage_prefetch_wait"] or 0.0, generation)


def _failure(server: CpuServer, what: str) -> ServerError:
    return ServerError(f"a streamed request {what}. End of {server.log}:\n{server.log_tail()}")
