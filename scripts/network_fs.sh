#!/usr/bin/env bash
# The store on a real network file system with two clients, on this machine alone.
#
#   scripts/network_fs.sh [KIND...]           installs what is missing (apt-get), starts the servers, mounts twice,
#                                             runs tests/test_network_fs.py, prints what the file system does
#                                             (scripts/fs_facts.py), and takes everything down again
#   scripts/network_fs.sh --keep KIND         leaves it mounted, and says where, until Enter is pressed
#
# KIND is one or more of
#   glusterfs         two bricks, GlusterFS as it comes: attributes are cached for a second
#   glusterfs-exact   the same without caches of attributes
#   sshfs             an OpenSSH server on 127.0.0.1, without caches: locks are local to each client
# and by default all of them. Needs root, /dev/fuse, loop devices, and network namespaces: servers run in a
# namespace of their own, so nothing of them can be reached from outside. Safe to repeat. The last line is the
# verdict, and so is the exit status (77: this machine cannot do it).
#
# UCM_NO_INSTALL=1: installs nothing. UCM_PYTHON: interpreter with the core environment.

set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
here="$PWD"
base=/dev/shm/ucm-netfs
address=192.0.2.1 # TEST-NET-1, on the loopback device of the namespace: glusterd refuses 127.0.0.1
python="${UCM_PYTHON:-$here/.envs/core/bin/python}"
keep=no
kinds=()
for argument in "$@"; do
  case "$argument" in
    --keep) keep=yes ;;
    glusterfs | glusterfs-exact | sshfs) kinds+=("$argument") ;;
    *) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 2 ;;
  esac
done
[ ${#kinds[@]} -gt 0 ] || kinds=(glusterfs glusterfs-exact sshfs)

say() { printf '%s\n' "network_fs.sh: $*"; }
cannot() { say "NOT RUN: $*"; exit 77; }
# run COMMAND...: quiet unless it fails.
run() {
  "$@" >"$home/command.log" 2>&1 && return 0
  say "failed: $*"
  tail -n 20 "$home/command.log"
  return 1
}
# again COMMAND...: like run, tried five times.
again() {
  local tries
  for tries in 1 2 3 4; do
    "$@" >/dev/null 2>&1 && return 0
    sleep "$tries"
  done
  run "$@"
}
inside() { nsenter --target "$namespace" --net "$@"; }

install() {
  local program="$1" package="$2"
  command -v "$program" >/dev/null && return 0
  [ -z "${UCM_NO_INSTALL:-}" ] || cannot "no $program (apt-get install $package)"
  command -v apt-get >/dev/null || cannot "no $program, and no apt-get to install $package with"
  say "installing $package"
  if ! { DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $package ||
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $package; }; } \
    >"$home/apt.log" 2>&1; then
    tail -n 5 "$home/apt.log"
    cannot "apt-get cannot install $package"
  fi
  # Debian may start what it installs; the servers of this script are its own.
  command -v "$program" >/dev/null || cannot "$package has no $program"
}

# Everything that a run starts lives in its namespace or on its mounts; so this finds all of it, also what an
# earlier run left behind.
take_down() {
  local home="$1" point pid
  [ -d "$home" ] || return 0
  for point in "$home/a" "$home/b"; do
    while mountpoint -q "$point"; do umount "$point" 2>/dev/null || umount -l "$point" || break; done
  done
  if [ -s "$home/namespace.pid" ]; then
    local holder net
    holder="$(cat "$home/namespace.pid")"
    net="$(readlink "/proc/$holder/ns/net" 2>/dev/null)"
    if [ -n "$net" ] && [ "$net" != "$(readlink /proc/self/ns/net)" ]; then
      for round in TERM TERM KILL; do
        for pid in /proc/[0-9]*; do
          [ "$(readlink "$pid/ns/net" 2>/dev/null)" = "$net" ] && [ "${pid#/proc/}" != "$holder" ] &&
            kill -s "$round" "${pid#/proc/}" 2>/dev/null
        done
        sleep 0.3
      done
      kill -KILL "$holder" 2>/dev/null
    fi
  fi
  for point in "$home"/brick*; do
    while mountpoint -q "$point"; do umount "$point" 2>/dev/null || umount -l "$point" || break; done
  done
  rm -rf "$home"
}

start_namespace() {
  unshare --net sleep infinity &
  namespace=$!
  disown
  echo "$namespace" >"$home/namespace.pid"
  local tries=0
  # Until unshare has made it.
  while [ "$(readlink "/proc/$namespace/ns/net" 2>/dev/null)" = "$(readlink /proc/self/ns/net)" ]; do
    tries=$((tries + 1))
    [ "$tries" -lt 50 ] && kill -0 "$namespace" 2>/dev/null || cannot "no network namespaces (unshare --net)"
    sleep 0.1
  done
  run inside ip link set lo up && run inside ip address add "$address/32" dev lo
}

start_glusterfs() {
  local brick bricks=() options="log-file=$home/client.log"
  install glusterd "glusterfs-server glusterfs-client"
  install mkfs.xfs xfsprogs
  install ip iproute2
  start_namespace || return 1
  mkdir -p "$home/state" "$home/log"
  for brick in brick1 brick2; do
    mkdir -p "$home/$brick"
    truncate -s 1G "$home/$brick.img"
    run mkfs.xfs -q "$home/$brick.img" && run mount -o loop "$home/$brick.img" "$home/$brick" || return 1
    mkdir "$home/$brick/data"
    bricks+=("$address:$home/$brick/data")
    backing="${backing:+$backing:}$home/$brick/data"
  done
  cat >"$home/glusterd.vol" <<END
volume management
    type mgmt/glusterd
    option working-directory $home/state
    option transport-type socket
    option transport.address-family inet
    option transport.socket.bind-address $address
    option transport.socket.listen-port 24007
    option ping-timeout 0
    option max-port 60999
end-volume
END
  run inside glusterd --volfile="$home/glusterd.vol" --log-file="$home/log/glusterd.log" \
    --pid-file="$home/glusterd.pid" || return 1
  local tries=0
  until inside gluster --mode=script volume list >/dev/null 2>&1; do
    tries=$((tries + 1))
    [ "$tries" -lt 100 ] || { say "glusterd does not answer"; tail "$home/log/glusterd.log"; return 1; }
    sleep 0.1
  done
  run inside gluster --mode=script volume create kv "${bricks[@]}" || return 1
  if [ "$kind" = glusterfs-exact ]; then
    options="$options,attribute-timeout=0,entry-timeout=0"
    run inside gluster --mode=script volume set kv performance.stat-prefetch off &&
      run inside gluster --mode=script volume set kv performance.quick-read off || return 1
  fi
  run inside gluster --mode=script volume start kv || return 1
  for client in a b; do
    run inside mount -t glusterfs -o "$options" "$address:/kv" "$home/$client" || return 1
  done
}

start_sshfs() {
  install sshfs sshfs
  install sshd openssh-server
  install ip iproute2
  start_namespace || return 1
  mkdir -p "$home/data" /run/sshd
  backing="$home/data"
  run ssh-keygen -q -t ed25519 -N '' -f "$home/host_key" && run ssh-keygen -q -t ed25519 -N '' -f "$home/key" ||
    return 1
  cat >"$home/sshd_config" <<END
Port 2222
ListenAddress 127.0.0.1
HostKey $home/host_key
AuthorizedKeysFile $home/key.pub
PidFile $home/sshd.pid
StrictModes no
PermitRootLogin prohibit-password
UsePAM no
Subsystem sftp internal-sftp
END
  run inside "$(command -v sshd)" -f "$home/sshd_config" -E "$home/sshd.log" || return 1
  for client in a b; do
    # A busy machine's sshd may refuse at first.
    again inside sshfs -p 2222 "root@127.0.0.1:$home/data" "$home/$client" \
      -o "IdentityFile=$home/key,StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null" \
      -o dir_cache=no,attr_timeout=0,entry_timeout=0 || return 1
  done
}

# one KIND: to be run in the background, as a process of its own, so that it takes itself down whatever happens.
one() {
  kind="$1"
  home="$base/$$-$kind"
  backing=""
  namespace=""
  trap 'take_down "$home"' EXIT
  child=""
  trap '[ -n "$child" ] && kill "$child"; exit 130' INT TERM HUP
  mkdir -p "$home/a" "$home/b"
  chmod 700 "$home"
  say "starting $kind"
  case "$kind" in
    glusterfs*) start_glusterfs || exit 1 ;;
    sshfs) start_sshfs || exit 1 ;;
  esac
  say "$kind is mounted: $home/a and $home/b"
  if [ "$keep" = yes ]; then
    say "UCM_FS_CLIENT_A=$home/a UCM_FS_CLIENT_B=$home/b UCM_FS_BACKING=$backing; Enter takes it down"
    read -r _
    exit 0
  fi
  status=0
  # In the background: a signal to this script is acted upon at once, not after the last test.
  UCM_FS_CLIENT_A="$home/a" UCM_FS_CLIENT_B="$home/b" UCM_FS_BACKING="$backing" \
    "$python" -m pytest -q tests/test_network_fs.py &
  child=$!
  wait "$child" || status=1
  child=""
  "$python" scripts/fs_facts.py "$home/a" "$home/b" || status=1
  exit $status
}

[ "$(id -u)" = 0 ] || cannot "only root can mount"
[ -c /dev/fuse ] || cannot "there is no /dev/fuse"
[ -x "$python" ] || cannot "no $python; scripts/env.sh core makes it"
mkdir -p "$base"
for left in "$base"/*; do
  owner="$(basename "$left" | cut -d- -f1)"
  if [ -d "$left" ] && ! kill -0 "$owner" 2>/dev/null; then
    say "taking down what an earlier run left: $left"
    take_down "$left"
  fi
done

summary=()
verdict=PASS
code=0
part=""
trap '[ -n "$part" ] && kill "$part" && wait "$part"; exit 130' INT TERM HUP
for kind in "${kinds[@]}"; do
  started=$SECONDS
  one "$kind" <&0 &
  part=$!
  wait "$part"
  case $? in
    0) outcome=ok ;;
    77) outcome="NOT RUN"; [ "$code" = 0 ] && { verdict="NOT RUN"; code=77; } ;;
    *) outcome=FAILED; verdict=FAIL; code=1 ;;
  esac
  summary+=("$(printf '%-18s %5d s  %s' "$kind" $((SECONDS - started)) "$outcome")")
done
rmdir "$base" 2>/dev/null
printf '\n'
printf '%s\n' "${summary[@]}"
say "$verdict"
exit $code
