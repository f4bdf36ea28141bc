package mutants

import (
	"bufio"
	"cmp"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// build runs a command of the go tool, which takes the edited sources for the real ones. It returns the program that results.
func build(t *testing.T, edits []edit, command ...string) string {
	t.Helper()
	dir := t.TempDir()
	overlay, program := filepath.Join(dir, "overlay.json"), filepath.Join(dir, "program")
	text, err := json.Marshal(map[string]any{"Replace": apply(t, edits)})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(overlay, text, 0o600); err != nil {
		t.Fatal(err)
	}
	args := slices.Insert(command, len(command)-1, "-overlay", overlay, "-ldflags=-s -w", "-o", program) // the last one is the package
	if out, err := exec.CommandContext(t.Context(), "go", args...).CombinedOutput(); err != nil {
		t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return program
}

// apply writes edited copies of the product's sources. It returns their names by those of the originals.
func apply(t *testing.T, edits []edit) map[string]string {
	t.Helper()
	dir, copies := t.TempDir(), make(map[string]string)
	for _, e := range edits {
		original, err := filepath.Abs(filepath.Join("..", "..", e.file))
		if err != nil {
			t.Fatal(err)
		}
		source, again := copies[original]
		if !again {
			source = original
		}
		text, err := os.ReadFile(source)
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(string(text), e.old); n != 1 {
			t.Fatalf("the mutant must be brought up to date: %s has this %d times instead of once:\n%s", e.file, n, e.old)
		}
		copies[original] = filepath.Join(dir, filepath.Base(e.file))
		if err := os.WriteFile(copies[original], []byte(strings.Replace(string(text), e.old, e.new, 1)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return copies
}

// find runs a program until it tells of a violation of one of the kinds.
func find(t *testing.T, kinds []string, program string, args ...string) {
	t.Helper()
	if found, output, err := run(t, kinds, program, args...); !found {
		t.Errorf("not found: it ends with %v and without a violation of the kinds %q:\n%s", err, kinds, output)
	}
}

// pass runs a program that must find nothing.
func pass(t *testing.T, program string, args ...string) {
	t.Helper()
	if _, output, err := run(t, nil, program, args...); err != nil {
		t.Errorf("%v\n%s", err, output)
	}
}

// run runs a program to its end, or until it tells of a violation of one of the kinds. It returns the end of its output as well.
func run(t *testing.T, kinds []string, program string, args ...string) (found bool, output string, err error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = cmd.Stdout
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	const most = 60
	var last []string
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<20)
	for !found && lines.Scan() {
		last = append(last[max(0, len(last)+1-most):], lines.Text())
		found = slices.Contains(kinds, violation(lines.Text()))
	}
	if found {
		t.Log(strings.TrimSpace(lines.Text()))
		_ = cmd.Process.Kill() // it may have ended already
	}
	return found, strings.Join(last, "\n"), cmp.Or(cmd.Wait(), lines.Err())
}

// told matches what the simulation prints of each violation, after its place in the test, and what the rig prints of each kind.
var told = regexp.MustCompile(`^\s+(?:\w+\.go:\d+: |violations, )([a-z ]+): `)

// violation returns the kind of the violation that a line tells of, if it does.
func violation(line string) string {
	if match := told.FindStringSubmatch(line); match != nil {
		return match[1]
	}
	return ""
}
