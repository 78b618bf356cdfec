#!/usr/bin/env bash
# Installs the dependencies of pyproject.toml into ${VIRTUAL_ENV}, at the versions that it pins.
# Reads VARIANT, EXTRAS and TORCH_INDEX as the Dockerfile describes them.
set -euo pipefail

case "${VARIANT}" in
  # Leaves out what only GPUs need. The CUDA runtime stays: it reports that there is no GPU.
  cpu) left_out='^(triton|cuda-|nvidia-(?!ml-py|cuda-runtime|cuda-cupti))' ;;
  cuda) left_out='^$' ;;
  *) echo "VARIANT is cpu or cuda, not ${VARIANT}" >&2; exit 1 ;;
esac
if [ -n "${TORCH_INDEX}" ]; then
  export UV_INDEX=${TORCH_INDEX} UV_INDEX_STRATEGY=unsafe-best-match  # 2.15.0+cpu before 2.15.0
fi
extras=()
for extra in ${EXTRAS}; do extras+=(--extra "${extra}"); done

uv venv --quiet --python "$(command -v python3)" "${VIRTUAL_ENV}"
uv pip compile --quiet --no-header --no-annotate "${extras[@]}" pyproject.toml > /tmp/all.txt
grep -Pv "${left_out}" /tmp/all.txt > /tmp/requirements.txt
uv pip install --no-deps --requirements /tmp/requirements.txt
if [ "${VARIANT}" = cpu ]; then
  site_packages=$("${VIRTUAL_ENV}/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  python3 docker/without_cuda.py "${site_packages}"
fi
