package main

import (
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"example.com/redislock"
	"example.com/redislock/faults/history"
)

// report says for one class what is promised and what was seen.
func report(w io.Writer, c *campaign, f history.Findings) {
	verdict := "kept"
	if len(f.Violations) > 0 {
		verdict = fmt.Sprintf("BROKEN %d times", len(f.Violations))
	}
	fmt.Fprintf(w, "%-16s %s: %s; no task lost, no key for ever, books balance\n", c.class.name, verdict, c.class.promise)
	fmt.Fprintf(w, "  %d lock cycles, %d runs (%d unlocked), %d tasks (at the end in the queue: %s); %d processes killed, %d books open with their processes\n",
		f.Cycles, f.Runs, f.Unlocked, f.Enqueued, counts(f.Queue), f.Killed, f.OpenBooks)
	fmt.Fprintf(w, "  fenced writes: %d accepted, %d refused\n", f.Writes, f.Refused)
	fmt.Fprintf(w, "  model: %d operations in %d pieces, the largest of %d, %d given up\n", c.order.Operations, c.order.Pieces, c.order.Largest, c.order.Unknown)
	fmt.Fprintf(w, "  events: %s; %d %% of the deliveries did not get to run\n", counts(f.Events), unrun(f.Events))
	fmt.Fprintf(w, "  faults: %s", counts(f.Faults))
	if missing := c.class.missing(f.Faults); len(missing) > 0 {
		fmt.Fprintf(w, "; none: %s", strings.Join(missing, ", "))
	}
	fmt.Fprintf(w, "\n  allowed overlaps: %s", counts(f.Excused))
	if f.Longest > 0 {
		fmt.Fprintf(w, ", the longest %v", f.Longest.Round(time.Millisecond))
	}
	fmt.Fprintln(w)
	shown := make(map[string]int)
	for _, v := range f.Violations {
		if shown[v.Kind]++; shown[v.Kind] <= 5 {
			fmt.Fprintf(w, "  %s: %s\n", v.Kind, v.Text)
		}
	}
	for _, kind := range slices.Sorted(maps.Keys(shown)) {
		fmt.Fprintf(w, "  violations, %s: %d\n", kind, shown[kind])
	}
	if len(f.Violations) > 0 {
		fmt.Fprintf(w, "  histories: %s\n", c.dir)
	}
	if len(f.Violations) > 0 && !c.again {
		fmt.Fprintf(w, "  again: %s -server %s\n", c.commandLine(), c.server)
	}
}

// unrun is how many of 100 deliveries found their lock taken, or Redis out of reach.
func unrun(events map[string]int) int {
	ran, all := events[string(redislock.EventRan)], 0
	for _, kind := range []redislock.EventKind{redislock.EventRan, redislock.EventSkipped, redislock.EventDone, redislock.EventRequeued,
		redislock.EventArchived, redislock.EventRefused} {
		all += events[string(kind)]
	}
	return 100 * (all - ran) / max(all, 1)
}

// commandLine runs the class again.
func (c *campaign) commandLine() string {
	if c.again { // a history does not say its seed
		return "unknown"
	}
	text := fmt.Sprintf("go run . -faults %s -duration %v -drain %v -workers %d -keys %d -rate %d -seed %d",
		c.class.name, c.duration, c.drain, c.workers, c.keys, c.rate, c.seed)
	if c.cycles > 0 {
		text += fmt.Sprint(" -cycles ", c.cycles)
	}
	if c.short {
		text += " -short"
	}
	return text
}

const tableHead = `| class | promised | server | lock cycles | handlers run | tasks | faults done | overlaps allowed, by reason | late writes refused | violations | again |
|---|---|---|---|---|---|---|---|---|---|---|
`

// appendRow writes the class's row of the table to a file, which is made if there is none.
func appendRow(name string, c *campaign, f history.Findings) error {
	file, err := os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return err
	}
	row := fmt.Sprintf("| %s | %s | %s | %d | %d | %d | %s | %s | %d | %d | `%s` |\n", c.class.name, c.class.promise, c.version,
		f.Cycles, f.Runs, f.Enqueued, counts(f.Faults), counts(f.Excused), f.Refused, len(f.Violations), c.commandLine())
	if info.Size() == 0 {
		row = tableHead + row
	}
	_, err = file.WriteString(row)
	return err
}

func counts(m map[string]int) string {
	if len(m) == 0 {
		return "none"
	}
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		parts = append(parts, fmt.Sprintf("%s %d", k, m[k]))
	}
	return strings.Join(parts, ", ")
}
