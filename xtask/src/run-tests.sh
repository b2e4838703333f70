#!/bin/sh
# Runs every test binary of this folder, says PASS or FAIL for each, and fails if any failed.
# Arguments go to the test binaries: ./run-tests.sh cuda runs the tests with "cuda" in their names.
here=$(cd "$(dirname "$0")" && pwd) || exit 1
cd "$here" || exit 1
STORM_BIN_DIR="$here/bin"
export STORM_BIN_DIR

passed=0
failed=""
for binary in "$here"/tests/*; do
    name=$(basename "$binary")
    echo "==> $name"
    if "$binary" "$@"; then
        echo "PASS $name"
        passed=$((passed + 1))
    else
        echo "FAIL $name"
        failed="$failed $name"
    fi
done

echo
if [ -n "$failed" ]; then
    echo "FAIL:$failed"
    exit 1
fi
echo "PASS: all $passed test binaries"
