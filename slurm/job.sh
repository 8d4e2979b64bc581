# What the sbatch files here have in common. Bash; sourced inside a job. Then:
#
#   lockstride_ranks COMMAND OPTIONS...   one step of the job: `python -m launch COMMAND OPTIONS` on every rank.
#                                         Returns its exit code once all ranks are gone.
#   lockstride_end CODE                   ends the job: requeues it where the time limit ended the work, else exits.
#   $lockstride_asked                     USR1 or TERM once Slurm has asked the job to end, else empty.
#   $lockstride_logs                      this start's own folder for logs.
#
# Knows: Slurm's variables and commands, site.env, how ranks are started and told to end.
# Does not know: what the ranks do, or which ranks there are in the end (launch/ranks/rendezvous.py checks that).
#
# Nobody here guesses: what cannot be found out ends the job with a text that says what to set.

lockstride_say() { echo "lockstride: $(date +%FT%T) $*" >&2; }
lockstride_fail() { lockstride_say "error: $*"; exit 2; }

# The first name of a node list: gpu[07-09,12],login1 -> gpu07. Needs no scontrol, which containers often lack.
lockstride_first_host() {
  local list=$1 name=
  while [[ $list =~ ^([^][,]+|\[([0-9]+)[^]]*\])(.*)$ ]]; do
    name+=${BASH_REMATCH[2]:-${BASH_REMATCH[1]}}
    list=${BASH_REMATCH[3]}
    [[ $list != ,* ]] || break
  done
  [ -n "$name" ] || return 1
  echo "$name"
}

# The IPv4 address of an interface of this host.
lockstride_address_of() {
  local shown
  shown=$(ip -4 -o addr show dev "$1" scope global 2>/dev/null; ip -4 -o addr show dev "$1" scope host 2>/dev/null)
  [[ $shown =~ inet\ ([0-9.]+) ]] && echo "${BASH_REMATCH[1]}"
}

# Where all ranks meet. On several nodes this is an address of the first one, and never localhost instead.
lockstride_meeting_address() {
  local first address
  first=$(lockstride_first_host "${SLURM_JOB_NODELIST:-}") ||
    lockstride_fail "SLURM_JOB_NODELIST is '${SLURM_JOB_NODELIST:-}', where the names of nodes should be"
  if [ "$lockstride_nodes" = 1 ]; then
    echo 127.0.0.1
  elif [ -n "$LOCKSTRIDE_INTERFACE" ]; then
    [ "${SLURMD_NODENAME:-$first}" = "$first" ] ||
      lockstride_fail "the batch script runs on $SLURMD_NODENAME, but rank 0 on $first: submit without --batch"
    address=$(lockstride_address_of "$LOCKSTRIDE_INTERFACE") ||
      lockstride_fail "LOCKSTRIDE_INTERFACE=$LOCKSTRIDE_INTERFACE has no IPv4 address on $first: see \`ip addr\` there"
    echo "$address"
  elif getent ahosts "$first" >/dev/null; then
    echo "$first"
  else
    lockstride_fail "the name of the first node, $first, has no address here: set LOCKSTRIDE_INTERFACE in site.env"
  fi
}

# A port of this job's own, from 20000 to 29999 (Linux gives those to nobody by itself), that nobody listens on here.
lockstride_free_port() {
  local tries port
  for tries in {0..99}; do
    port=$((20000 + (SLURM_JOB_ID * 7 + lockstride_steps + tries * 101) % 10000))
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || { echo "$port"; return; }
  done
  lockstride_fail "none of 100 ports from 20000 to 29999 is free on $(hostname)"
}

# Time for what has begun, within what Slurm leaves between SIGTERM and SIGKILL.
lockstride_drain_seconds() {
  local shown
  shown=$(timeout 10 scontrol show config 2>/dev/null) && [[ $shown =~ KillWait[\ =]+([0-9]+) ]] || return 0
  echo $((BASH_REMATCH[1] * 2 / 3))
}

lockstride_ranks() {
  local ranks=${LOCKSTRIDE_RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}} cpus=${SLURM_CPUS_ON_NODE:-1} code ended
  local per_rank=$((cpus / ranks > 0 ? cpus / ranks : 1)) command step
  # shellcheck disable=SC2206  # split at blanks on purpose
  local python=($LOCKSTRIDE_CONTAINER "$LOCKSTRIDE_PYTHON") options=($LOCKSTRIDE_SRUN_OPTIONS)
  MASTER_ADDR=$(lockstride_meeting_address) || exit 2
  MASTER_PORT=$(lockstride_free_port) || exit 2
  export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((per_rank < 8 ? per_rank : 8))}"
  # A rank that is lost makes the others end within seconds, and they say why. So srun waits for them: were they killed
  # at once (--kill-on-bad-exit=1), that would be lost, and the job's exit code would be 143 instead of rank 0's. Those
  # that are stopped, and cannot end, are killed after half a minute.
  step=(srun --nodes="$lockstride_nodes" --kill-on-bad-exit=0 --wait=30 --open-mode=append "${options[@]}")
  case $LOCKSTRIDE_LAUNCHER in
  srun)
    step+=(--ntasks="$((lockstride_nodes * ranks))" --ntasks-per-node="$ranks" --cpus-per-task="$per_rank"
      --distribution=block --output="$lockstride_logs/rank-%t.log" --error="$lockstride_logs/rank-%t.log")
    command=("${python[@]}" -m launch "$@")
    ;;
  torchrun)
    step+=(--ntasks="$lockstride_nodes" --ntasks-per-node=1 --cpus-per-task="$cpus")
    # SLURM_NODEID differs from task to task: bash reads it there.
    # shellcheck disable=SC2016
    command=(bash -c 'exec "${@//@node@/$SLURM_NODEID}"' bash "${python[@]}" -m torch.distributed.run
      --nnodes="$lockstride_nodes" --node-rank=@node@ --nproc-per-node="$ranks"
      --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --rdzv-id="$lockstride_start.$lockstride_steps"
      --log-dir="$lockstride_logs/node-@node@" --tee=3 --local-ranks-filter=0 -m launch "$@")
    ;;
  *) lockstride_fail "LOCKSTRIDE_LAUNCHER is '$LOCKSTRIDE_LAUNCHER', but must be torchrun or srun" ;;
  esac
  lockstride_say "$lockstride_nodes node(s) x $ranks rank(s) by $LOCKSTRIDE_LAUNCHER, meeting at" \
    "$MASTER_ADDR:$MASTER_PORT, logs in $lockstride_logs"
  lockstride_steps=$((lockstride_steps + 1))
  "${step[@]}" "${command[@]}" </dev/null &
  local pid=$!
  if [ "$LOCKSTRIDE_LAUNCHER" = srun ]; then  # what rank 0 says is shown here too
    tail -n +1 -F --sleep-interval=0.2 --pid="$pid" "$lockstride_logs/rank-0.log" 2>/dev/null &
    local shown=$!
  fi
  while :; do  # a signal ends `wait` early
    lockstride_woken=
    wait "$pid"
    ended=$?
    [ "$ended" = 127 ] || code=$ended
    [ -n "$lockstride_woken" ] && [ "$ended" != 127 ] || break
  done
  [ -z "${shown:-}" ] || wait "$shown"
  return "$code"
}

lockstride_on_signal() {
  lockstride_woken=1
  if [ "$1" = USR1 ] && [ -z "$lockstride_asked" ]; then
    lockstride_say "the time limit is near: finishing what has begun"
    [ "$SECONDS" -ge 60 ] || lockstride_say "that is $SECONDS s after the start: ask sbatch for a longer --time"
    scancel --signal=TERM "$lockstride_job" ||
      lockstride_say "scancel failed: Slurm will end the ranks at the time limit"
  fi
  lockstride_asked=$1
}

lockstride_end() {
  local code=$1 restarts=${SLURM_RESTART_COUNT:-0}
  if [ "$lockstride_asked" = TERM ]; then
    lockstride_say "ended by SIGTERM: submit the same command again to go on"
    exit 143
  elif [ "$lockstride_asked" != USR1 ] || [ "$code" = 0 ]; then
    exit "$code"
  elif [ "$restarts" -ge "$LOCKSTRIDE_MAX_RESTARTS" ]; then
    lockstride_say "restarted $restarts times (LOCKSTRIDE_MAX_RESTARTS): submit the same command again to go on"
    exit "$code"
  fi
  trap '' USR1 TERM
  lockstride_say "going back into the queue as job $lockstride_job after restart $restarts"
  scontrol requeue "$lockstride_job" ||
    lockstride_fail "job $lockstride_job cannot be requeued: submit the same command again to go on"
  exit 0
}

[ -n "${SLURM_JOB_ID:-}" ] || lockstride_fail "there is no Slurm job here: sbatch slurm/generate.sbatch ..."
lockstride_site=${LOCKSTRIDE_SITE:-$(dirname "${BASH_SOURCE[0]}")/site.env}
# shellcheck source=slurm/site.env
. "$lockstride_site" || lockstride_fail "$lockstride_site cannot be read"
if [ -n "$LOCKSTRIDE_MODULES" ]; then
  type module >/dev/null 2>&1 || for file in /etc/profile.d/*{lmod,modules}*.sh; do [ ! -r "$file" ] || . "$file"; done
  # shellcheck disable=SC2086  # split at blanks on purpose
  module load $LOCKSTRIDE_MODULES || lockstride_fail "module load $LOCKSTRIDE_MODULES: see LOCKSTRIDE_MODULES in site.env"
fi
if [ -z "$LOCKSTRIDE_PYTHON" ]; then
  LOCKSTRIDE_PYTHON=$LOCKSTRIDE_ROOT/.venv/bin/python
  [ -x "$LOCKSTRIDE_PYTHON" ] || LOCKSTRIDE_PYTHON=python3
fi
export PYTHONPATH="$LOCKSTRIDE_ROOT${PYTHONPATH:+:$PYTHONPATH}"
lockstride_nodes=${SLURM_JOB_NUM_NODES:?}
if [ -n "$LOCKSTRIDE_INTERFACE" ] && [ "$lockstride_nodes" -gt 1 ]; then
  export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-=$LOCKSTRIDE_INTERFACE}"
  export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$LOCKSTRIDE_INTERFACE}"
fi
# The SLURM_JOB_ID of an array's last task is the array's own number: scancel would tell all of its tasks.
lockstride_job=$SLURM_JOB_ID
[ -z "${SLURM_ARRAY_JOB_ID:-}" ] || lockstride_job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
lockstride_start=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
lockstride_logs=${LOCKSTRIDE_LOGS:-${SLURM_SUBMIT_DIR:-$PWD}/slurm-logs}/$lockstride_start
mkdir -p "$lockstride_logs" || lockstride_fail "$lockstride_logs cannot be made: see LOCKSTRIDE_LOGS in site.env"
lockstride_steps=0 lockstride_asked='' lockstride_woken=''
trap 'lockstride_on_signal USR1' USR1
trap 'lockstride_on_signal TERM' TERM
