//go:build unix

package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"example.com/redislock/internal/postgres"
)

// TestMain lets the test program be a worker, as the command itself is.
func TestMain(m *testing.M) {
	if os.Getenv(roleVariable) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

func TestPlainLockCorruptsAndTheOthersDoNot(t *testing.T) {
	if testing.Short() {
		t.Skip("not with -short: the whole play takes 15 s")
	}
	tmp := ownTempDir(t)
	var out bytes.Buffer
	err := play(t.Context(), &out)
	skipWithoutPostgres(t, err)
	if err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	want := "\nsummary: plain=corrupted(110) fenced=right(130) row-lock=right(130)\n"
	if !strings.HasSuffix(out.String(), want) {
		t.Errorf("want it to end in %q:\n%s", want, out.String())
	}
	nothingIsLeft(t, tmp)
}

func TestBrokenOffWhileAWorkerIsStopped(t *testing.T) {
	tmp := ownTempDir(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out := &cutter{at: "SIGSTOP", cut: cancel}
	err := play(ctx, out)
	skipWithoutPostgres(t, err)
	if !errors.Is(err, context.Canceled) || strings.Contains(out.String(), "summary:") {
		t.Errorf("want the context's error and no summary, got %v\n%s", err, out.String())
	}
	nothingIsLeft(t, tmp)
}

// cutter breaks off at a word.
type cutter struct {
	bytes.Buffer
	at  string
	cut func()
}

func (c *cutter) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte(c.at)) {
		c.cut()
	}
	return c.Buffer.Write(p)
}

func TestEndingsThatAreNotAsPromisedAreRefused(t *testing.T) {
	good := func() []ending { return []ending{{actPlain, 110, 0}, {actFenced, 130, 1}, {actRowLock, 130, 1}} }
	if err := judge(good()); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func([]ending){
		"no corruption":            func(e []ending) { e[0].balance = 130 },
		"a plain lock that stops":  func(e []ending) { e[0].refused = 1 },
		"corruption with fencing":  func(e []ending) { e[1].balance = 110 },
		"no refusal by the fence":  func(e []ending) { e[1].refused = 0 },
		"corruption with row lock": func(e []ending) { e[2].balance = 110 },
		"no refusal by row lock":   func(e []ending) { e[2].refused = 0 },
	} {
		t.Run(name, func(t *testing.T) {
			e := good()
			spoil(e)
			if judge(e) == nil {
				t.Errorf("accepted: %v", e)
			}
		})
	}
}

func ownTempDir(t *testing.T) string {
	t.Helper()
	tmp := t.TempDir()
	if err := os.Chmod(filepath.Dir(tmp), 0o755); err != nil { // PostgreSQL may run as another user
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", tmp)
	return tmp
}

func skipWithoutPostgres(t *testing.T, err error) {
	t.Helper()
	if errors.Is(err, postgres.ErrNotInstalled) && os.Getenv("REDISLOCK_REQUIRE_SERVERS") == "" {
		t.Skip("skipped: ", err)
	}
}

// nothingIsLeft: no child of this process, running, stopped or uncollected, and no file.
func nothingIsLeft(t *testing.T, tmp string) {
	t.Helper()
	if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); !errors.Is(err, syscall.ECHILD) {
		t.Errorf("a process is left: %d, %v", pid, err)
	}
	if left, _ := os.ReadDir(tmp); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
