#!/bin/bash
# Make the environment in which the peers run, apart from Kronoscope's own: environment.sh [FOLDER] [PYTHON]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$here/../../.peers}
python=${2:-python3}
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check -r "$here/requirements.txt"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$here/peers.txt"
"$folder/bin/python" -c 'import bergson, curvlinops, dattri_llm, kronfluence'
echo "The peers stand in $folder"
