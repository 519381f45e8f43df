"""Start the service of service.py, ask it like any other HTTP client, and stop it."""

import json
import os
import socket
import sys
import threading
import time
from contextlib import closing
from http.client import HTTPConnection

import uvicorn
from service import app

os.environ["BUNDLE"] = sys.argv[1]  # where service.py looks for it


def ask(port: int, prompt: str) -> None:
    """Print the text of a prompt as it arrives."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("POST", "/write", json.dumps({"prompt": prompt, "max_tokens": 24}))
        answer = connection.getresponse()
        if answer.status != 200:
            print(answer.status, json.loads(answer.read())["error"])
            return
        for line in answer:
            if line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                print(event.get("text", f"\n--- {event}"), end="", flush=True)
        print()


with socket.socket() as listening:
    listening.bind(("127.0.0.1", 0))  # any free port
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    ask(listening.getsockname()[1], "def parse(self, text):\n")
    ask(listening.getsockname()[1], "")
    server.should_exit = True
    thread.join()
