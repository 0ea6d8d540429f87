#!/usr/bin/env bash
# The reference's scripts, thin over `python -m agentexecutor`. Sets up what is missing first: both environments, bubblewrap, the profile's model.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash scripts/run.sh {sft|rl|all|infer|demo|test} [options]

  sft     collect -> export -> sft-train
  rl      patch-swift, rl-prepare, rl-train from the newest SFT LoRA
  all     the whole loop: collect -> export -> sft -> rl-prepare -> grpo -> evaluate -> infer -> demo
  infer   ask the base model and the newest RL LoRA
  demo    refresh datasets/demo/
  test    every test but the nightly ones; test --all runs those too

--profile, --data-dir and --output-dir go to every command that knows them, the other options to the last one
(`python -m agentexecutor COMMAND --help` lists them; for `test` they are pytest's).
TEXT
}

what=${1:-}
case "$what" in
    sft | rl | all | infer | demo | test) shift ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python="$root/.venv/bin/python"
profile=() data=() output=() rest=() every_test=no
while (($#)); do
    case "$1" in
        --profile | --data-dir | --output-dir)
            (($# > 1)) || { echo "run.sh: $1 needs a value" >&2; exit 2; }
            set -- "$1=$2" "${@:3}"
            continue ;;
        --profile=*) profile=("$1") ;;
        --data-dir=*) data=("$1") ;;
        --output-dir=*) output=("$1") ;;
        --all) if [[ $what == test ]]; then every_test=yes; else rest+=("$1"); fi ;;
        *) rest+=("$1") ;;
    esac
    shift
done

python3 "$root/scripts/setup_env.py" --with-vllm
models() { "$python" "$root/scripts/download_model.py" "$@"; }
step() { "$python" -m agentexecutor "$@"; }
last() { exec "$python" -m agentexecutor "$@" "${rest[@]}"; }

case "$what" in
    test)
        models --profile=smoke
        models --profile=laptop
        cd "$root"
        if [[ $every_test == yes ]]; then selection=(); else selection=(-m "not nightly"); fi
        exec "$python" -m pytest "${selection[@]}" "${rest[@]}" ;;
    sft)
        models "${profile[@]}"
        step collect "${profile[@]}" "${data[@]}" "${output[@]}"
        step export "${profile[@]}" "${data[@]}" "${output[@]}"
        last sft-train "${profile[@]}" "${data[@]}" "${output[@]}" ;;
    rl)
        models "${profile[@]}"
        step patch-swift "${profile[@]}"
        step rl-prepare "${profile[@]}" "${data[@]}" "${output[@]}"
        last rl-train "${profile[@]}" "${data[@]}" "${output[@]}" ;;
    all)
        models "${profile[@]}"
        last all "${profile[@]}" "${data[@]}" "${output[@]}" ;;
    infer)
        models "${profile[@]}"
        last infer "${profile[@]}" "${output[@]}" ;;
    demo)
        last create-demo "${profile[@]}" "${data[@]}" "${output[@]}" ;;
esac
