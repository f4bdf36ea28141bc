package redislock

import (
	"context"
	"errors"
	"log/slog"
	"time"
)

// EventKind says what an Event reports.
type EventKind string

// Outcomes: each task that a Locker handles ends in exactly one of them.
const (
	EventRan      EventKind = "ran"      // the handler ran; Err is what became of it, Unlocked whether without a lock (WithFailOpen)
	EventSkipped  EventKind = "skipped"  // another task holds the lock and the policy drops this one
	EventDone     EventKind = "done"     // the work was done already: a marker is there (WithDoneFor)
	EventRequeued EventKind = "requeued" // put back for later without having run, or asynq took the task back meanwhile
	EventArchived EventKind = "archived" // archived without having run
	EventRefused  EventKind = "refused"  // failed without having run, in a way that counts: Err says why
	EventPassed   EventKind = "passed"   // the handler ran and needs no lock of its own: NoLock, or held further up the call chain
)

// A lock's life: each lock that is acquired ends in exactly one of the other three.
const (
	EventAcquired  EventKind = "acquired"
	EventReleased  EventKind = "released"  // Err when that is not confirmed: a key in Redis then lapses within one TTL; of a row lock, nobody knows whether its work was committed
	EventLost      EventKind = "lost"      // Err says how it was noticed
	EventAbandoned EventKind = "abandoned" // the work outlived its context by the grace period, or Shutdown's patience
)

// Event is one fact about one task or one lock.
type Event struct {
	Kind EventKind
	// Key is the key of the lock, empty where none could be derived.
	Key string
	// TaskID, TaskType and Queue name the task at hand. Empty where Do or TryAcquire are used outside a handler.
	TaskID, TaskType, Queue string
	// Holder is who stands in the way, of a task that did not run, or in a lock's life the lock's own holder.
	Holder Holder
	// Waited is the time from the task's arrival, or the call of Do or TryAcquire, to its lock or, without one, to its outcome.
	// Held is the time the lock was held.
	Waited, Held time.Duration
	// Unlocked says that the handler ran without a lock because Redis was unavailable (WithFailOpen).
	Unlocked bool
	// Err is the reason, where there is one.
	Err error
}

// logLine gives the level and the words for an event. What only says that all is well is for debugging.
func (e Event) logLine() (slog.Level, string) {
	switch e.Kind {
	case EventRan:
		return slog.LevelDebug, "task ran"
	case EventSkipped:
		return slog.LevelInfo, "task skipped: another task holds the lock"
	case EventDone:
		return slog.LevelInfo, "task skipped: its work is done already"
	case EventRequeued:
		if errors.Is(e.Err, ErrUnavailable) {
			return slog.LevelWarn, "task put back: it did not run, since its lock could not be asked for"
		}
		return slog.LevelInfo, "task put back: it did not run"
	case EventArchived:
		return slog.LevelWarn, "task archived: it did not run"
	case EventRefused:
		return slog.LevelWarn, "task failed: it did not run"
	case EventLost:
		return slog.LevelError, "lock lost: the work may be running elsewhere too"
	case EventAbandoned:
		return slog.LevelError, "lock abandoned: its handler did not return in time, the key lapses"
	case EventReleased:
		if e.Err != nil {
			return slog.LevelWarn, "lock released without confirmation: its key may lapse only with its TTL, and a done marker, or a row lock's work, may be missing"
		}
		return slog.LevelDebug, "lock released"
	case EventPassed:
		return slog.LevelDebug, "task ran: no lock of its own needed"
	default:
		return slog.LevelDebug, "lock acquired"
	}
}

// attrs are what a log line tells of the event.
func (e Event) attrs() []slog.Attr {
	attrs := []slog.Attr{slog.String("key", e.Key)}
	if e.TaskID != "" || e.TaskType != "" {
		attrs = append(attrs, slog.String("task_id", e.TaskID), slog.String("task_type", e.TaskType), slog.String("queue", e.Queue))
	}
	if e.Holder != (Holder{}) {
		attrs = append(attrs, slog.String("holder", e.Holder.String()))
	}
	if e.Waited > 0 {
		attrs = append(attrs, slog.Duration("waited", e.Waited))
	}
	if e.Held > 0 {
		attrs = append(attrs, slog.Duration("held", e.Held))
	}
	var held *HeldError
	switch {
	case e.Holder != (Holder{}) && errors.As(e.Err, &held) && held.Error() == e.Err.Error(): // says all that once more
		if held.RetryIn > 0 {
			attrs = append(attrs, slog.Duration("retry_in", held.RetryIn))
		}
	case e.Err != nil:
		attrs = append(attrs, slog.String("reason", e.Err.Error()))
	}
	return attrs
}

// emit writes the event's log line and tells the observers. It is never called with a mutex held.
func (l *Locker) emit(ctx context.Context, e *Event) {
	level, text := e.logLine()
	if log := l.log(); log.Enabled(ctx, level) {
		log.LogAttrs(ctx, level, "redislock: "+text, e.attrs()...)
	}
	for _, observe := range l.observers {
		l.tell(ctx, observe, *e)
	}
}

// tell calls one observer and contains its panic: watching must not break the work.
func (l *Locker) tell(ctx context.Context, observe func(context.Context, Event), e Event) {
	defer func() {
		if p := recover(); p != nil {
			l.log().ErrorContext(ctx, "redislock: observer panicked", "event", string(e.Kind), "key", e.Key, "panic", p)
		}
	}()
	observe(ctx, e)
}

// log returns the logger in force. slog.Default is asked each time, since programs often set it after their locks.
func (l *Locker) log() *slog.Logger {
	if l.logger != nil {
		return l.logger
	}
	return slog.Default()
}
