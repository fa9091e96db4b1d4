"""What the command `llm` gets from a server. Usage: llm_checks.py BASE_URL MODEL; prints one JSON object.

Set LLM_USER_PATH to a folder of the caller's; the model is described there as `llm` wants it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

base_url, model = sys.argv[1:]
# JSON is YAML.
described = [
    {
        "model_id": "octavo",
        "model_name": model,
        "api_base": f"{base_url}/v1",
        "supports_tools": True,
        "supports_schema": True,
    }
]
(Path(os.environ["LLM_USER_PATH"]) / "extra-openai-models.yaml").write_text(json.dumps(described))
schema = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
function = '''
def describe(name: str, age: int) -> str:
    """Describe a person."""
    return f"{name} is {age}."
'''


def llm(*arguments: str) -> str:
    command = [str(Path(sys.executable).parent / "llm"), "prompt", "-m", "octavo", "--key", "none", *arguments]
    done = subprocess.run([*command, "Name three primes."], capture_output=True, text=True, timeout=60)
    if done.returncode:
        sys.exit(f"llm {' '.join(arguments)} failed:\n{done.stderr}")
    return done.stdout.strip()


plain = llm("--no-stream")
streamed = llm()
answered = llm("--functions", function, "--no-stream")
person = json.loads(llm("--schema", json.dumps(schema)))
# The call is in the log that `llm` keeps.
logs = subprocess.run(
    [str(Path(sys.executable).parent / "llm"), "logs", "--json", "-n", "0"],
    capture_output=True,
    text=True,
    check=True,
)
(call,) = [call for entry in json.loads(logs.stdout) for call in entry.get("tool_calls", ())]
print(
    json.dumps(
        {
            "plain": plain,
            "streamed": streamed,
            "tool": {"name": call["name"], "arguments": call["arguments"]},
            "answered": answered,
            "json": person,
        }
    )
)
