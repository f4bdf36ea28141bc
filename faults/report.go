package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"example.com/redislock/faults/history"
)

// report says for one class what is promised and what was seen.
func report(w io.Writer, c class, f history.Findings) {
	verdict := "kept"
	if len(f.Violations) > 0 {
		verdict = fmt.Sprintf("BROKEN %d times", len(f.Violations))
	}
	fmt.Fprintf(w, "%-16s %s: %s; no task lost, no key for ever, books balance\n", c.name, verdict, c.promise)
	fmt.Fprintf(w, "  %d lock cycles, %d runs, %d tasks (at the end in the queue: %s); %d processes killed, %d books open with their processes\n",
		f.Cycles, f.Runs, f.Enqueued, counts(f.Queue), f.Killed, f.OpenBooks)
	fmt.Fprintf(w, "  events: %s\n", counts(f.Events))
	fmt.Fprintf(w, "  faults: %s\n", counts(f.Faults))
	fmt.Fprintf(w, "  allowed overlaps: %s", counts(f.Excused))
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
