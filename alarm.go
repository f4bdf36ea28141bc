package redislock

import (
	"container/heap"
	"sync"
	"time"
)

// alarms wake the locks of a Locker, with one timer for all. They have none while there is no lock.
type alarms struct {
	awake func()

	mu    sync.Mutex
	locks alarmHeap
	timer *time.Timer
	armed time.Time // when the timer fires; zero if it does not
}

// alarm is a lock's place among them. Their mutex guards it.
type alarm struct {
	at    time.Time
	exact bool // not to go off earlier, with others
	place int  // in the heap, from 1; 0 if it is not there
}

func (a *alarms) len() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.locks)
}

// set sets or moves the alarm of a lock.
func (a *alarms) set(k *Lock, at time.Time, exact bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	alarm := &k.watchdog.alarm
	alarm.at, alarm.exact = at, exact
	if alarm.place == 0 {
		heap.Push(&a.locks, k)
	} else {
		heap.Fix(&a.locks, alarm.place-1)
	}
	a.arm()
}

func (a *alarms) remove(k *Lock) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if place := k.watchdog.alarm.place; place > 0 {
		heap.Remove(&a.locks, place-1)
		a.arm()
	}
}

// take removes and returns the locks whose time has come, and some of those whose time comes soon.
func (a *alarms) take(now, soon time.Time) (due []*Lock) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.armed = time.Time{}
	for len(a.locks) > 0 {
		first := &a.locks[0].watchdog.alarm
		if first.at.After(now) && (first.exact || first.at.After(soon)) {
			break
		}
		due = append(due, heap.Pop(&a.locks).(*Lock))
	}
	a.arm()
	return due
}

// arm sets the timer for the first alarm. One that is set too early is left alone: it then finds nothing to do.
func (a *alarms) arm() {
	if len(a.locks) == 0 {
		if a.timer != nil {
			a.timer.Stop()
		}
		a.armed = time.Time{}
		return
	}
	first := a.locks[0].watchdog.alarm.at
	if !a.armed.IsZero() && !first.Before(a.armed) {
		return
	}
	a.armed = first
	if a.timer == nil {
		a.timer = time.AfterFunc(time.Until(first), a.awake)
	} else {
		a.timer.Reset(time.Until(first))
	}
}

// alarmHeap implements heap.Interface.
type alarmHeap []*Lock

func (h alarmHeap) Len() int           { return len(h) }
func (h alarmHeap) Less(i, j int) bool { return h[i].watchdog.alarm.at.Before(h[j].watchdog.alarm.at) }

func (h alarmHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].watchdog.alarm.place, h[j].watchdog.alarm.place = i+1, j+1
}

func (h *alarmHeap) Push(k any) {
	lock := k.(*Lock)
	*h = append(*h, lock)
	lock.watchdog.alarm.place = len(*h)
}

func (h *alarmHeap) Pop() any {
	last := len(*h) - 1
	lock := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	lock.watchdog.alarm.place = 0
	return lock
}
