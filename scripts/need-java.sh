#!/usr/bin/env bash
# Says in one line what is missing for Apache Kafka or Spark, and how to install it. Arguments: further commands needed.
set -u
version=$(java -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p')
if [ -z "$version" ] || [ "$version" -lt 17 ]; then
    echo "Java 17 or newer is missing. Install it: apt-get install openjdk-17-jdk-headless (or: brew install openjdk@17)" >&2
    exit 1
fi
for tool in "$@"; do
    if ! command -v "$tool" >/dev/null; then
        echo "Maven's '$tool' is missing. Install it: apt-get install maven (or: brew install maven)" >&2
        exit 1
    fi
done
