package redislock

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/hibiken/asynq"
)

// A KeyFunc gives the name of the lock that a task runs under: tasks with the same name never run at the same time. It is
// called each time a task is handed out, before the handler and in its context, by many goroutines at once. Any name will do, also one made
// by hand; make it with Digest where parts of a payload go into it, since a name is visible to whoever can read Redis.
//
// An error fails the task without running it, as an error of its handler would: asynq retries it, or archives it at once if
// the error is asynq.SkipRetry. An empty name is such an error too. The error NoLock lets the task run without a lock.
type KeyFunc func(ctx context.Context, task *asynq.Task) (name string, err error)

// NoLock is what a KeyFunc returns for a task that takes no lock: the task runs at once, next to whatever else runs.
//
//lint:ignore ST1012 it is an answer rather than a failure, and reads like one: return "", redislock.NoLock
var NoLock = errors.New("redislock: task takes no lock")

// ByTypeAndPayload is the KeyFunc for copies of one piece of work: same type, same payload byte for byte. It is the default.
// A nil payload is the empty one. It never fails.
func ByTypeAndPayload(ctx context.Context, task *asynq.Task) (string, error) {
	subject := subjectOf(ctx, task)
	return digestName(subject, "ByTypeAndPayload", task.Payload(), subject), nil
}

// ByType is the KeyFunc for work of which one at a time may run, whatever the payload: a migration, a rebuild of an index.
// It never fails.
func ByType(ctx context.Context, task *asynq.Task) (string, error) {
	subject := subjectOf(ctx, task)
	return digestName(subject, "ByType", nil, subject), nil
}

// ByTaskID is the KeyFunc for tasks that may all run side by side, only none next to an earlier run of itself that asynq
// gave up on and that has not ended yet. IDs are unique in a queue: where several queues use the same asynq.TaskID, it takes
// PerQueue to tell them apart. It fails with ErrInvalidKey for a task without an ID, one that comes from no asynq server.
func ByTaskID(ctx context.Context, task *asynq.Task) (string, error) {
	subject := subjectOf(ctx, task)
	id, ok := asynq.GetTaskID(ctx)
	if !ok {
		return "", fmt.Errorf("%w: no task ID in the context of task type %q", ErrInvalidKey, task.Type())
	}
	return digestName(subject, "ByTaskID", nil, subject, id), nil
}

// ByJSON returns a KeyFunc for tasks of one type whose JSON payloads agree in the fields at paths, one tenant or one day for
// instance: ByJSON("tenant.id", "date"). Without paths they agree as a whole. Values agree when they mean the same: the order
// of object keys, white space and the spelling of strings and numbers do not matter (1.0 is 1e0), while every digit of a
// number does. null is a value like any other.
//
// A path names the objects on the way and then the field, with a dot in between; a dot inside a name is written `\.` and a
// backslash `\\`. It does not lead into arrays. ByJSON panics if a path is not made like that.
//
// The KeyFunc fails with ErrInvalidKey if a field is missing, or if the payload as a whole, not at the paths alone, is not JSON
// in UTF-8 that means one thing only: no key twice in an object, no half of a surrogate pair.
func ByJSON(paths ...string) KeyFunc {
	paths = slices.Clone(paths)
	routes := make([][]string, len(paths))
	for i, path := range paths {
		routes[i] = splitPath(path)
	}
	return func(ctx context.Context, task *asynq.Task) (string, error) {
		doc, err := parseJSON(task.Payload())
		if err != nil {
			return "", fmt.Errorf("%w: payload of task type %q: %w", ErrInvalidKey, task.Type(), err)
		}
		var values []byte
		for i, route := range routes {
			value, ok := lookUp(doc, route)
			if !ok {
				return "", fmt.Errorf("%w: field %q is missing in the payload of task type %q", ErrInvalidKey, paths[i], task.Type())
			}
			values = appendCanonical(values, value)
		}
		if len(paths) == 0 {
			values = appendCanonical(values, doc)
		}
		subject := subjectOf(ctx, task)
		return digestName(subject, "ByJSON", values, append([]string{subject}, paths...)...), nil
	}
}

// ByHeader returns a KeyFunc for tasks of one type that carry the same value in the header of that name, which is matched
// letter by letter. An empty value is a value. The KeyFunc fails with ErrInvalidKey for a task without that header. ByHeader
// panics if name is empty.
func ByHeader(name string) KeyFunc {
	if name == "" {
		panic("redislock: ByHeader: the header name is empty")
	}
	return func(ctx context.Context, task *asynq.Task) (string, error) {
		value, ok := task.Headers()[name]
		if !ok {
			return "", fmt.Errorf("%w: header %q is missing in the task of type %q", ErrInvalidKey, name, task.Type())
		}
		subject := subjectOf(ctx, task)
		return digestName(subject, "ByHeader", nil, subject, name, value), nil
	}
}

// PerQueue returns a KeyFunc that tells queues apart: tasks to which key gives the same name share a lock only when they come
// from the same queue. The KeyFunc fails as key does, and with ErrInvalidKey where key gives an empty name or the task comes
// from no queue. PerQueue panics if key is nil.
func PerQueue(key KeyFunc) KeyFunc {
	if key == nil {
		panic("redislock: PerQueue: the KeyFunc is nil")
	}
	return func(ctx context.Context, task *asynq.Task) (string, error) {
		name, err := innerName(ctx, task, key)
		if err != nil {
			return "", err
		}
		queue, ok := asynq.GetQueueName(ctx)
		if !ok {
			return "", fmt.Errorf("%w: no queue in the context of task type %q", ErrInvalidKey, task.Type())
		}
		// Without the task type, so that a key that spans types keeps spanning them.
		return digestName(readable(name), "PerQueue", nil, queue, name), nil
	}
}

// Shared returns a KeyFunc for task types that must not run next to each other, imports and exports of one tenant for
// instance: Shared("tenant-data", ByJSON("tenant.id")) on every one of them. The ready-made functions inside key see scope in
// place of the task type; a KeyFunc of your own sees the task as it is. Another scope is always another lock. The KeyFunc
// fails as key does, and with ErrInvalidKey where key gives an empty name. Shared panics if scope is empty or key is nil.
func Shared(scope string, key KeyFunc) KeyFunc {
	if scope == "" {
		panic("redislock: Shared: the scope is empty")
	}
	if key == nil {
		panic("redislock: Shared: the KeyFunc is nil")
	}
	return func(ctx context.Context, task *asynq.Task) (string, error) {
		name, err := innerName(context.WithValue(ctx, scopeKey{}, scope), task, key)
		if err != nil {
			return "", err
		}
		return digestName(scope, "Shared", nil, scope, name), nil
	}
}

// Digest makes a lock name out of a label, which stays readable, and parts, which do not: label, a colon and 32 hexadecimal
// digits. Another label, another part or another division into parts is another name, so it is safe to give it what others
// have written. It never gives the name that a KeyFunc of this package gives.
func Digest(label string, parts ...string) string {
	return digestName(label, "Digest", nil, append([]string{label}, parts...)...)
}

// maxName keeps names readable in a terminal. In bytes.
const maxName = 200

// lockName turns what a KeyFunc or a caller gave into what stands in the key: the name itself where it is fit for that, else
// a digest of it. Braces would move the cluster slot, the rest would garble terminals and logs.
func lockName(name string) (string, error) {
	if name == "" {
		return "", fmt.Errorf("%w: the lock name is empty", ErrInvalidKey)
	}
	unfit := func(r rune) bool { return r == '{' || r == '}' || unicode.IsControl(r) }
	if len(name) > maxName || !utf8.ValidString(name) || strings.ContainsFunc(name, unfit) {
		return digestName("digest", "lockName", nil, name), nil
	}
	return name, nil
}

// innerName is the name that a wrapped key gives, never an empty one: that would be one lock for everything.
func innerName(ctx context.Context, task *asynq.Task, key KeyFunc) (string, error) {
	name, err := key(ctx, task)
	if err == nil && name == "" {
		err = fmt.Errorf("%w: the lock name of task type %q is empty", ErrInvalidKey, task.Type())
	}
	return name, err
}

// scopeKey is where Shared leaves its scope in the context.
type scopeKey struct{}

// subjectOf is what the ready-made functions put in front and digest first: the scope of Shared, or the task type.
func subjectOf(ctx context.Context, task *asynq.Task) string {
	if scope, ok := ctx.Value(scopeKey{}).(string); ok {
		return scope
	}
	return task.Type()
}

// digestLen is the length of the digest at the end of a name: half of a SHA-256, in hexadecimal digits.
const digestLen = sha256.Size

// digestName is front, a colon and the digest of label, parts and payload. Each goes in after its length and each function
// has its own label, so that whatever differs in any of them differs as a whole.
func digestName(front, label string, payload []byte, parts ...string) string {
	head := appendText(make([]byte, 0, 256), label)
	for _, part := range parts {
		head = appendText(head, part)
	}
	head = binary.AppendUvarint(head, uint64(len(payload)))

	hash := sha256.New()
	hash.Write(head)
	hash.Write(payload)
	var digits [digestLen]byte
	hex.Encode(digits[:], hash.Sum(head[:0])[:digestLen/2])
	return front + ":" + string(digits[:])
}

// appendText appends text after its length.
func appendText(b []byte, text string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(text))), text...)
}

// readable is the part of a name for people: what stands before its digest, if it has one.
func readable(name string) string {
	colon := len(name) - digestLen - 1
	if colon >= 0 && name[colon] == ':' && strings.Trim(name[colon+1:], "0123456789abcdef") == "" {
		return name[:colon]
	}
	return name
}

// splitPath takes a path of ByJSON apart. One that has no single meaning panics: it is a slip in the program.
func splitPath(path string) []string {
	var route []string
	var name []byte
	for i := 0; i < len(path); i++ {
		switch path[i] {
		case '.':
			route, name = append(route, string(name)), nil
		case '\\':
			i++
			if i == len(path) || path[i] != '.' && path[i] != '\\' {
				panic(fmt.Sprintf(`redislock: ByJSON: path %q: a backslash stands before a dot or a backslash only`, path))
			}
			fallthrough
		default:
			name = append(name, path[i])
		}
	}
	route = append(route, string(name))
	if slices.Contains(route, "") {
		panic(fmt.Sprintf("redislock: ByJSON: path %q: a name between the dots is empty", path))
	}
	return route
}
