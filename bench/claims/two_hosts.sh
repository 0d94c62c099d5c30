#!/usr/bin/env bash
# Two hosts with a thin wire between them: two network namespaces, a veth pair, `tc tbf` on both ends.
#
# What is measured, and the claim: see two_hosts.py, which runs once in each namespace, on one core each.
#
#     bench/claims/two_hosts.sh --json two_hosts.json
#     RATES="1000" bench/claims/two_hosts.sh --steps 4              # one rate only, fewer steps
#
# Needs root, iproute2 (ip, tc), taskset and two cores: says so and stops with 2 where it lacks one.
# Variables: RATES (Mbit/s, default "1000 200"), CORES (default "0 1"), PYTHON (default python).
# Options are those of two_hosts.py. Namespaces and processes are gone when it ends, however it ends.

set -euo pipefail

RATES=${RATES:-1000 200}
read -r -a CORE <<<"${CORES:-0 1}"
PYTHON=${PYTHON:-python}
HERE=$(cd "$(dirname "$0")" && pwd)
NAMESPACES=("shardwise-$$-0" "shardwise-$$-1")
WIRE=wire                                # the interface's name in both namespaces
FOLDER=
RANKS=()                                 # the processes that run now

cannot() {
    echo "two_hosts.sh cannot run here: $1" >&2
    exit 2
}

clean_up() {
    local status=$?
    trap - EXIT INT TERM HUP
    for pid in ${RANKS[@]+"${RANKS[@]}"}; do
        kill -KILL "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true  # here, so that bash does not report it
    done
    for namespace in "${NAMESPACES[@]}"; do ip netns del "$namespace" 2>/dev/null || true; done
    [[ -z $FOLDER ]] || rm -rf "$FOLDER"
    exit "$status"
}

# Which tools there are is asked first, so that nothing is half made when one is missing.
[[ $(id -u) == 0 ]] || cannot "network namespaces and traffic shaping need root"
for tool in ip tc taskset; do
    command -v "$tool" >/dev/null || cannot "there is no '$tool' (packages iproute2 and util-linux)"
done
command -v "$PYTHON" >/dev/null || cannot "there is no '$PYTHON'; name one: PYTHON=python3 bench/claims/two_hosts.sh"
for argument in "$@"; do                 # before anything is made
    case $argument in -h | --help) exec "$PYTHON" "$HERE/two_hosts.py" --help ;; esac
done
for core in "${CORE[@]:0:2}"; do
    taskset -c "$core" true 2>/dev/null || cannot "core $core cannot be had; name two: CORES=\"2 3\""
done

trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

for namespace in "${NAMESPACES[@]}"; do
    ip netns add "$namespace" 2>/dev/null || cannot "'ip netns add' is refused (a container without CAP_SYS_ADMIN?)"
done
ip -n "${NAMESPACES[0]}" link add "$WIRE" type veth peer name "$WIRE" netns "${NAMESPACES[1]}" 2>/dev/null ||
    cannot "'ip link add type veth' is refused (no veth module, or no CAP_NET_ADMIN)"
for rank in 0 1; do
    ip -n "${NAMESPACES[rank]}" addr add "10.77.0.$((rank + 1))/24" dev "$WIRE"
    ip -n "${NAMESPACES[rank]}" link set lo up
    ip -n "${NAMESPACES[rank]}" link set "$WIRE" up
done

# A bucket of 1 ms of the rate, but two of the largest packets that leave at once (64 KiB): less, and the
# shaper has to cut them; much more, and each pause buys a piece of the wire for nothing. A queue of 50 ms
# holds what two connections have under way: less, and packets are dropped.
shape() {
    local mbit=$1 burst=$(($1 * 125))
    ((burst >= 131072)) || burst=131072
    for namespace in "${NAMESPACES[@]}"; do
        tc -n "$namespace" qdisc replace dev "$WIRE" root tbf rate "${mbit}mbit" burst "$burst" latency 50ms ||
            cannot "'tc qdisc ... tbf' is refused (no sch_tbf module, or no CAP_NET_ADMIN)"
    done
}

FOLDER=$(mktemp -d)
for mbit in $RATES; do
    shape "$mbit"
    mkdir "$FOLDER/$mbit"
    RANKS=()
    for rank in 0 1; do
        GLOO_SOCKET_IFNAME=$WIRE OMP_NUM_THREADS=1 ip netns exec "${NAMESPACES[rank]}" \
            taskset -c "${CORE[rank]}" "$PYTHON" "$HERE/two_hosts.py" "$@" \
            --rank "$rank" --rate-mbit "$mbit" --folder "$FOLDER/$mbit" &
        RANKS+=($!)
    done
    # Either may fail first, and the other would wait for it.
    for _ in 0 1; do wait -n; done
    RANKS=()
done
"$PYTHON" "$HERE/two_hosts.py" "$@" --collect "$FOLDER"
