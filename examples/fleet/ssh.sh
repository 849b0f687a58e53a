#!/usr/bin/env bash
# ssh: validate the hosts of a list, at most 32 at a time, and compare what they answer. Nothing is copied to them.
#
#     ./ssh.sh hosts.txt [level]        a host a line; # begins a comment
#
# Reports go to ./reports/HOST.json. A host that cannot be reached or does not answer in time leaves none, and is missing in the end.
set -u

hosts=${1:?usage: ssh.sh HOSTS [LEVEL]}
level=${2:-quick}
reports=${REPORTS:-reports}
seconds=${SECONDS_EACH:-300}
mkdir -p "$reports"

validate() { # host, level, folder, seconds
    part=$3/.$1.part
    timeout --kill-after=5 "$4" ${SSH:-ssh -o BatchMode=yes -o ConnectTimeout=10} "$1" \
        portable-flash validate --level "$2" --timeout "$(($4 - 30))" --quiet --json - >"$part" 2>"$3/$1.log" </dev/null
    code=$?
    # 0, 1 and 2 are verdicts; others are those of ssh and timeout
    if [ "$code" -le 2 ] && [ -s "$part" ]; then mv "$part" "$3/$1.json"; else rm -f "$part"; fi
    echo "$1: exit code $code" >&2
}
export -f validate
export SSH

sed 's/#.*//' "$hosts" | awk 'NF { print $1 }' | xargs -P 32 -I{} bash -c 'validate "$@"' _ {} "$level" "$reports" "$seconds"
exec portable-flash fleet compare "$reports" --expect "$hosts" --html "$reports/fleet.html"
