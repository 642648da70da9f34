#!/usr/bin/env bash
# A TPU slice without Kubernetes: create its VMs, start one container on each, follow the leader's log, delete them.
#
#   export TYPE=v5litepod-16 ZONE=us-west4-a IMAGE=REGISTRY/jaxserve:tpu MODEL=/models/llama-3.1-8b-instruct
#   deploy/tpu-vm.sh up | logs | down
#
# NAME, RUNTIME and DISK (a read-only disk with checkpoints, mounted at /models) are variables too. Every VM finds the
# others by the metadata of its slice: that is what --pod asks.
set -euo pipefail

NAME=${NAME:-jaxserve}
TYPE=${TYPE:-v5litepod-16}
ZONE=${ZONE:?the zone of the slice}
RUNTIME=${RUNTIME:-v2-alpha-tpuv5-lite} # of a v6e: v2-alpha-tpuv6e
IMAGE=${IMAGE:?an image built from Dockerfile.tpu}
MODEL=${MODEL:-/models/llama-3.1-8b-instruct}
SERVE=(jaxserve.serve --pod --model="$MODEL" --tensor=4 --data=4 --host=0.0.0.0 --token-file=/etc/jaxserve/token
  --compilation-cache=/cache/xla --drain-timeout=60 --join-timeout=1200)

on() { # on WORKER COMMAND: over ssh, on one VM or on all
  gcloud compute tpus tpu-vm ssh "$NAME" --zone "$ZONE" --worker "$1" --command "$2"
}

up() {
  gcloud compute tpus tpu-vm create "$NAME" --zone "$ZONE" --accelerator-type "$TYPE" --version "$RUNTIME" \
    ${DISK:+--data-disk "source=$DISK,mode=read-only"}
  if [[ -n ${DISK:-} ]]; then
    on all 'sudo mkdir -p /models && sudo mount -o ro,noload /dev/sdb /models'
  fi
  # The token of the clients is made on the leader; followers are asked nothing, but have the same flags.
  on all 'sudo mkdir -p /etc/jaxserve /cache && openssl rand -hex 32 | sudo tee /etc/jaxserve/token >/dev/null'
  # libtpu wants the host's network, all of its chips, and locked memory. Exit code 2 is a mistake: no restart mends it.
  on all "sudo docker run --detach --name $NAME --net host --privileged --ulimit memlock=-1 --stop-timeout 90 \
    --restart on-failure:5 -v /models:/models:ro -v /cache:/cache -v /etc/jaxserve:/etc/jaxserve:ro $IMAGE ${SERVE[*]}"
}

logs() { on 0 "sudo docker logs --follow $NAME"; }

down() {
  on all "sudo docker stop $NAME" || true # drains
  gcloud compute tpus tpu-vm delete "$NAME" --zone "$ZONE" --quiet
}

case ${1:-} in
  up | logs | down) "$1" ;;
  *) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
