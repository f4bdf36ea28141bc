#!/usr/bin/env bash
# Fetches the Redis-compatible servers that the tests run against, besides the system's own redis-server:
#
#   servers.sh DIR    puts the start scripts redis-8.0, valkey-8.1 and valkey-9 into DIR and prints their versions
#
# They come from newer Debian suites, through the mirror this Debian machine already uses, each with its own C
# library, and nothing outside DIR changes. A server that is there and runs is kept, so run it again at will. DIR can
# be moved. Wants bash, apt and flock, about 60 MiB to download and 150 MiB on disk.
set -euo pipefail
dir=${1:?usage: servers.sh DIR}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)

exec 9>"$dir/.lock" # two runs at once would unpack over each other
flock 9

runs() { "$dir/$1" --version >/dev/null 2>&1; }

# apt itself knows best what its configuration says, whichever of its file formats that is in.
debian_mirror() {
  apt-get indextargets --format '$(ORIGIN)|$(LABEL)|$(SITE)' 'Created-By: Packages' |
    awk -F'|' '$1 == "Debian" && $2 == "Debian" && !found { print $3; found = 1 }'
}

fetch() { # SUITE PACKAGE...: unpacks the packages with all they depend on into $dir/SUITE
  local suite=$1 mirror apt=$dir/.apt new=$dir/.unpacking
  shift
  mirror=$(debian_mirror)
  if [ -z "$mirror" ]; then # a machine whose package lists were never fetched, or were cleaned away
    apt-get -qq update >&2
    mirror=$(debian_mirror)
  fi
  [ -n "$mirror" ] || { echo "servers.sh: apt knows no Debian mirror here" >&2; return 1; }

  rm -rf "$apt" "$new" "${dir:?}/$suite"
  mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$new"
  # Some mirrors serve a list past its date; its signature is checked all the same.
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg check-valid-until=no] $mirror $suite main" >"$apt/sources.list"
  : >"$apt/status" # nothing counts as installed, so that every dependency is downloaded too
  local options=(-qq -y --no-install-recommends -o APT::Sandbox::User=root -o Acquire::Retries=3 -o APT::Update::Error-Mode=any
    -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=/dev/null -o Dir::Etc::preferencesparts=/dev/null
    -o Dir::State::status="$apt/status" -o Dir::State::lists="$apt/lists" -o Dir::Cache="$apt/cache")
  apt-get "${options[@]}" update >&2
  apt-get "${options[@]}" --download-only install "$@" >&2
  local deb
  for deb in "$apt"/cache/archives/*.deb; do dpkg -x "$deb" "$new"; done
  mv "$new" "$dir/$suite"
  rm -rf "$apt"
}

start_script() { # NAME SUITE PROGRAM
  local name=$1 suite=$2 program=$3 libc lib loader
  cd "$dir/$suite"
  libc=$(find usr/lib -name libc.so.6 -print -quit)
  lib=${libc%/*}
  loader=$(find "$lib" -name 'ld-linux*.so.*' -print -quit)
  # The program looks at the name it is called by to know what it is (sentinel, check-rdb), and in the package it may be
  # a link to one of those, so it gets a file of its own under its own name.
  mkdir -p run
  cp -L "usr/bin/$program" "run/$program"
  cat >"$dir/.$name" <<SCRIPT
#!/bin/sh
at=\${0%/*}/$suite
exec "\$at/$loader" --library-path "\$at/$lib" --argv0 $program "\$at/run/$program" "\$@"
SCRIPT
  chmod +x "$dir/.$name"
  "$dir/.$name" --version >/dev/null # only what runs is given its name, and only the name counts as fetched
  mv "$dir/.$name" "$dir/$name"
  cd "$dir"
}

if ! runs redis-8.0 || ! runs valkey-8.1; then
  rm -f "$dir/redis-8.0" "$dir/valkey-8.1" # what they start is about to go
  fetch trixie redis-server valkey-server
  start_script redis-8.0 trixie redis-server
  start_script valkey-8.1 trixie valkey-server
fi
if ! runs valkey-9; then
  rm -f "$dir/valkey-9"
  fetch forky valkey-server # the coming Debian
  start_script valkey-9 forky valkey-server
fi
for name in redis-8.0 valkey-8.1 valkey-9; do echo "$name: $("$dir/$name" --version)"; done
