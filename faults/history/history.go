// Package history is what the processes of a campaign, or the hosts of a simulation, write down, and the checker that reads it.
package history

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"

	"github.com/hibiken/asynq"
	"golang.org/x/sys/unix"
)

// Record is one line of a history. What a product event says keeps the product's name for it (redislock.EventKind).
type Record struct {
	T        int64  `json:"t"` // ns of CLOCK_MONOTONIC, which all processes of a machine share
	Kind     string `json:"kind"`
	Process  string `json:"process,omitempty"` // the one that writes, or of the rig's records, the one they are about
	Delivery int64  `json:"delivery,omitempty"`
	Outer    int64  `json:"outer,omitempty"` // of a delivery that is seen a second time, within another middleware: the first one's number
	Task     string `json:"task,omitempty"`
	Type     string `json:"type,omitempty"` // of the task
	Key      string `json:"key,omitempty"`
	Holder   string `json:"holder,omitempty"` // the task that stands in the way, or left the marker
	Fault    string `json:"fault,omitempty"`
	Until    int64  `json:"until,omitempty"`    // of a fault or a stall: its end; of a delivery: the task's deadline
	State    string `json:"state,omitempty"`    // of a task in the queue
	DoneFor  int64  `json:"done_for,omitempty"` // ns
	Clash    bool   `json:"clash,omitempty"`    // the file lock was taken
	Retried  int    `json:"retried,omitempty"`  // of a delivery: how many attempts asynq has counted as failed
	Deaf     bool   `json:"deaf,omitempty"`     // the handler does not look at its context
	Unlocked bool   `json:"unlocked,omitempty"` // WithFailOpen lets the handler run without a lock
	Grace    int64  `json:"grace,omitempty"`    // of a delivery, ns: WithGracePeriod
	Archives bool   `json:"archives,omitempty"` // of a delivery: its policy may archive it
	Fence    int64  `json:"fence,omitempty"`    // the number of the lock (WithFencing)
	Err      string `json:"err,omitempty"`
}

// The kinds of records that are not the product's events.
const (
	KindEnqueued = "enqueued" // a task that asynq accepted
	KindSeen     = "seen"     // a delivery reached the middleware
	KindTry      = "try"      // Do or TryAcquire was called: a delivery without an outcome
	KindTaken    = "taken"    // the context of a delivery ended: asynq has settled the task, or taken it back
	KindEnter    = "enter"    // a handler is in its critical section from here
	KindWrite    = "write"    // a handler writes to what its lock guards, which takes no lower number than before; Err when refused
	KindExit     = "exit"     // to here at least; Err is its result
	KindStall    = "stall"    // the process did not run from T to Until, by its own timers
	KindBye      = "bye"      // the process ends in order; Err when handlers still ran
	KindFault    = "fault"    // Fault was done to Process or Key, or to all, from T to Until
	KindKilled   = "killed"   // SIGKILL is about to be sent to Process
	KindGone     = "gone"     // Process has ended, and the system has let go of what it held
	KindDied     = "died"     // Process ended without having been told to
	KindQueued   = "queued"   // what the queue holds at the end; Err is the reason of an archived task
	KindSet      = "set"      // Redis has set the lock's TTL: it did an acquire or an extension
	KindModel    = "model"    // Redis did for a lock what no lock may ask for; Err says what
	KindImmortal = "immortal" // a lock key that has no TTL, or a longer one than it may have
	KindLeftover = "leftover" // a lock key that outlived its processes by more than a TTL
)

// Now is the stamp of a record.
func Now() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(err) // every Linux has this clock
	}
	return ts.Nano()
}

// Writer is one process's file of records. It is safe for concurrent use.
type Writer struct {
	process string
	file    *os.File
	failed  atomic.Bool
}

// Create makes the file of a process in dir, which must not have one yet.
func Create(dir, process string) (*Writer, error) {
	file, err := os.OpenFile(filepath.Join(dir, process+".jsonl"), os.O_CREATE|os.O_EXCL|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	return &Writer{process: process, file: file}, nil
}

// Add writes r with one write(2), so that a SIGKILL leaves no half a line. A zero T is stamped here.
func (h *Writer) Add(r Record) {
	if r.T == 0 {
		r.T = Now()
	}
	if r.Process == "" && r.Kind != KindFault {
		r.Process = h.process
	}
	line, err := json.Marshal(r)
	if err != nil {
		panic(err) // strings, numbers and bools always marshal
	}
	if _, err := h.file.Write(append(line, '\n')); err != nil && !h.failed.Swap(true) {
		fmt.Fprintln(os.Stderr, "faults: write history:", err)
	}
}

// Close reports whether the history is complete.
func (h *Writer) Close() error {
	err := h.file.Close()
	if h.failed.Load() {
		return fmt.Errorf("history of %s: records are missing", h.process)
	}
	return err
}

// ReadDir returns the records of all processes in the order of their stamps.
func ReadDir(dir string) ([]Record, error) {
	names, err := filepath.Glob(filepath.Join(dir, "*.jsonl"))
	if err != nil {
		return nil, err
	}
	var all []Record
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		lines := bufio.NewScanner(bytes.NewReader(data))
		lines.Buffer(nil, 1<<20)
		for n := 1; lines.Scan(); n++ {
			var r Record
			if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
				return nil, fmt.Errorf("%s:%d: %w", name, n, err)
			}
			all = append(all, r)
		}
		if err := lines.Err(); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	slices.SortStableFunc(all, func(a, b Record) int { return cmp.Compare(a.T, b.T) })
	return all, nil
}

// Queued returns a record of every task that a queue still has.
func Queued(inspector *asynq.Inspector, queue string) (records []Record, err error) {
	for state, list := range map[string]func(string, ...asynq.ListOption) ([]*asynq.TaskInfo, error){
		"pending":   inspector.ListPendingTasks,
		"active":    inspector.ListActiveTasks,
		"scheduled": inspector.ListScheduledTasks,
		"retry":     inspector.ListRetryTasks,
		"archived":  inspector.ListArchivedTasks,
	} {
		const size = 1000
		for page, full := 1, true; full; page++ {
			tasks, err := list(queue, asynq.Page(page), asynq.PageSize(size))
			if errors.Is(err, asynq.ErrQueueNotFound) { // nothing was ever enqueued
				break
			}
			if err != nil {
				return nil, fmt.Errorf("list %s tasks: %w", state, err)
			}
			for _, task := range tasks {
				records = append(records, Record{Kind: KindQueued, Task: task.ID, State: state, Err: task.LastErr})
			}
			full = len(tasks) == size
		}
	}
	return records, nil
}
