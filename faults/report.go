package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
)

// report says for one class what is promised and what was seen.
func report(w io.Writer, c class, f findings) {
	verdict := "kept"
	if len(f.violations) > 0 {
		verdict = fmt.Sprintf("BROKEN %d times", len(f.violations))
	}
	fmt.Fprintf(w, "%-16s %s: %s; no task lost, no key for ever, books balance\n", c.name, verdict, c.promise)
	fmt.Fprintf(w, "  %d lock cycles, %d runs, %d tasks (at the end in the queue: %s); %d processes killed, %d books open with their processes\n",
		f.cycles, f.runs, f.enqueued, counts(f.queue), f.killed, f.openBooks)
	fmt.Fprintf(w, "  events: %s\n", counts(f.events))
	fmt.Fprintf(w, "  faults: %s\n", counts(f.faults))
	fmt.Fprintf(w, "  allowed overlaps: %s", counts(f.excused))
	if f.longest > 0 {
		fmt.Fprintf(w, ", the longest %v", f.longest.Round(time.Millisecond))
	}
	fmt.Fprintln(w)
	shown := make(map[string]int)
	for _, v := range f.violations {
		if shown[v.kind]++; shown[v.kind] <= 5 {
			fmt.Fprintf(w, "  %s: %s\n", v.kind, v.text)
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
