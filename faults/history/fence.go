package history

import (
	"cmp"
	"slices"
)

// The kinds of violations of fencing.
const (
	BadFence = "fence"       // a lock's number is not higher than that of a lock before it
	BadWrite = "stale write" // a write was accepted after one with a higher number
)

// checkFences wants the numbers of a key's locks to grow, whatever happens to Redis and to the holders, and no write to be accepted
// that carries a lower one than a write before it.
func (c *checker) checkFences(history []Record) {
	type fenced struct{ asked, acquired, fence int64 }
	locks := make(map[string][]fenced)
	for _, d := range c.deliveries {
		if d.enter != nil && d.enter.Fence > 0 && len(d.acquired) == 1 {
			locks[d.enter.Key] = append(locks[d.enter.Key], fenced{d.seen, d.acquired[0].T, d.enter.Fence})
		}
	}
	for _, key := range sortedKeys(locks) {
		byAsked, byAcquired := locks[key], slices.Clone(locks[key])
		slices.SortFunc(byAsked, func(a, b fenced) int { return cmp.Compare(a.asked, b.asked) })
		slices.SortFunc(byAcquired, func(a, b fenced) int { return cmp.Compare(a.acquired, b.acquired) })
		var highest int64 // of those that were acquired before the one at hand was asked for
		seen := make(map[int64]bool)
		for _, l := range byAsked {
			for len(byAcquired) > 0 && byAcquired[0].acquired < l.asked {
				highest = max(highest, byAcquired[0].fence)
				byAcquired = byAcquired[1:]
			}
			if l.fence <= highest || seen[l.fence] {
				c.Add(BadFence, "%s: the lock acquired at %d has number %d, and %d was there before", key, l.acquired, l.fence, max(highest, l.fence))
			}
			seen[l.fence] = true
		}
	}
	highest := make(map[string]Record)
	for _, r := range history { // the stamps are made while what is written to is locked
		if r.Kind != KindWrite {
			continue
		}
		if r.Err != "" {
			c.Refused++
			continue
		}
		c.Writes++
		if last := highest[r.Key]; r.Fence < last.Fence || r.Fence == last.Fence && r.Task != last.Task {
			c.Add(BadWrite, "%s: number %d of %s was accepted after %d of %s", r.Key, r.Fence, r.Task, last.Fence, last.Task)
		}
		highest[r.Key] = r
	}
}
