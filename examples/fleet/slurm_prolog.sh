#!/usr/bin/env bash
# Slurm: validate a node's GPUs before a job, or now and then, and keep the report where `portable-flash fleet compare` finds it.
#
# As a prolog, slurm.conf:              Prolog=/etc/slurm/portable_flash.sh     (runs on each node of an allocation, as root)
#                                       PrologFlags=Alloc                       (at allocation, not with the job's first step)
# As a health check, slurm.conf:        HealthCheckProgram=/etc/slurm/portable_flash.sh
#                                       HealthCheckInterval=86400
#                                       HealthCheckNodeState=IDLE               (never beside a running job)
#
# Slurm kills a HealthCheckProgram after 60 s, so the validation gets 45 s and `timeout` ends it at 55. A prolog that exits with
# another code than 0 makes Slurm drain the node: this script exits 0 whatever is found, because what to do with a node is the
# site's decision. To let failures drain, uncomment the line below.
set -u

reports=${PORTABLE_FLASH_REPORTS:-/var/spool/portable_flash} # a folder that all nodes share, or one that is gathered
command=${PORTABLE_FLASH_COMMAND:-portable-flash}
node=${SLURMD_NODENAME:-$(hostname -s)}
say() { logger -t portable-flash -- "$1" 2>/dev/null || true; }

mkdir -p "$reports" || { say "$node: cannot make $reports"; exit 0; }
report=$reports/$node.json
timeout --kill-after=2 55 "$command" validate --level quick --timeout 45 --quiet --json "$report" >/dev/null 2>"$reports/$node.log"
code=$?

case $code in
0) say "$node: pass" ;;
1)
    say "$node: FAIL, see $report"
    # scontrol update NodeName="$node" State=DRAIN Reason="portable-flash: wrong numbers, see $report"
    ;;
*) say "$node: no verdict (exit code $code), see $reports/$node.log" ;; # out of time, no GPU, not installed: proves nothing
esac
exit 0
