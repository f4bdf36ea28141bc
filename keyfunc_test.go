package redislock

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"example.com/redislock/internal/virtual"
	"github.com/hibiken/asynq"
)

// secret stands for what is in a payload and must not be seen anywhere else.
const secret = "s3cr3t-0f-4-p4yl04d"

// mustName is the name that key gives a task.
func mustName(t testing.TB, ctx context.Context, key KeyFunc, task *asynq.Task) string {
	t.Helper()
	name, err := key(ctx, task)
	if err != nil {
		t.Fatalf("no name for a task of type %q: %v", task.Type(), err)
	}
	return name
}

// jsonName is the name that key gives a task with that payload.
func jsonName(t testing.TB, key KeyFunc, payload string) string {
	t.Helper()
	return mustName(t, context.Background(), key, asynq.NewTask("report", []byte(payload)))
}

// mustNotName gets the error for a task that has no name, which must not show its payload.
func mustNotName(t testing.TB, ctx context.Context, key KeyFunc, task *asynq.Task) error {
	t.Helper()
	name, err := key(ctx, task)
	switch {
	case !errors.Is(err, ErrInvalidKey) || name != "":
		t.Fatalf("name %q, error %v; want no name and ErrInvalidKey", name, err)
	case strings.Contains(err.Error(), secret):
		t.Fatalf("the error shows the payload: %v", err)
	}
	return err
}

// mustPanic gets the text of a panic.
func mustPanic(t testing.TB, f func()) (text string) {
	t.Helper()
	defer func() { text = fmt.Sprint(recover()) }()
	f()
	t.Error("no panic")
	return
}

// handlerContext is the context in which an asynq server handles a task from that queue.
func handlerContext(t *testing.T, queue, id string) (ctx context.Context) {
	t.Helper()
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		w.Host("h").Serve(asynq.Config{Queues: map[string]int{queue: 1}}, asynq.HandlerFunc(func(c context.Context, _ *asynq.Task) error {
			ctx = context.WithoutCancel(c)
			return nil
		}))
		w.Enqueue(asynq.NewTask("report", nil), asynq.Queue(queue), asynq.TaskID(id))
		w.Until(10*time.Second, "the task done", func() bool { return w.Drained(queue) })
	})
	return ctx
}

func TestReadyMadeNamesAreReadableInFrontAndDigestedBehind(t *testing.T) {
	payloads := map[string][]byte{
		"nil": nil, "empty": {}, "text": []byte(secret), "binary": {0, 0xff, '{', '}', '\n', 0x80},
		"1 MiB": bytes.Repeat([]byte(secret), 1<<20/len(secret)),
	}
	for _, taskType := range []string{"report:nightly", "{a}:b", "отчёт", "", strings.Repeat("long", 1000), "bell\a"} {
		for payload, bytes := range payloads {
			task := asynq.NewTaskWithHeaders(taskType, bytes, map[string]string{"tenant": secret})
			for _, c := range []struct {
				name  string
				key   KeyFunc
				front string
			}{
				{"ByTypeAndPayload", ByTypeAndPayload, taskType},
				{"ByType", ByType, taskType},
				{"ByHeader", ByHeader("tenant"), taskType},
				{"Shared", Shared("tenant-data", ByTypeAndPayload), "tenant-data"},
			} {
				name := mustName(t, context.Background(), c.key, task)
				digits, ok := strings.CutPrefix(name, c.front+":")
				if !ok || !regexp.MustCompile(`^[0-9a-f]{32}$`).MatchString(digits) {
					t.Errorf("%s of a %s payload: name %q", c.name, payload, name)
				}
				if strings.Contains(name, secret) {
					t.Errorf("%s of a %s payload: the name shows it: %q", c.name, payload, name)
				}
				checkLockName(t, name)
			}
		}
	}
}

// Workers of two versions must agree on the names, or they run side by side.
func TestNamesStayTheSameInLaterVersions(t *testing.T) {
	ctx := handlerContext(t, "low", "id-1")
	task := asynq.NewTaskWithHeaders("report", []byte(`{"a":{"b":[1,"x",null,true]}}`), map[string]string{"tenant": "7"})
	lock := func(name string) KeyFunc {
		return func(context.Context, *asynq.Task) (string, error) { return lockName(name) }
	}
	for _, c := range []struct {
		name string
		key  KeyFunc
		want string
	}{
		{"ByTypeAndPayload", ByTypeAndPayload, "report:ecc2f23d2f48ba4731c2482ac1f08378"},
		{"ByType", ByType, "report:d6844c27fbcd976d000f2d45da9c9b86"},
		{"ByTaskID", ByTaskID, "report:b76dacfb7ea9b9ff431954c257479c51"},
		{"ByHeader", ByHeader("tenant"), "report:f1a37b9efa26d00589c0ca98d9b14b9b"},
		{"ByJSON whole", ByJSON(), "report:136ff3e054d51811838732a32986bec1"},
		{"ByJSON field", ByJSON("a.b"), "report:f67c2c352822b42950e5fafb1526aa94"},
		{"PerQueue", PerQueue(ByType), "report:4d4297176f4527a4872c6fb8809ecf07"},
		{"Shared", Shared("scope", ByType), "scope:411f1ed443124feedaafb9f53452a969"},
		{"Digest", lock(Digest("label", "a", "b")), "label:578f6303f942d2da0afa5b5bd0f3e147"},
		{"unfit name", lock("{a}"), "digest:88deae54f686ec72dce74818b077fead"},
	} {
		if name := mustName(t, ctx, c.key, task); name != c.want {
			t.Errorf("%s: name %q, want %q", c.name, name, c.want)
		}
	}
}

func TestNilAndEmptyPayloadAreTheSame(t *testing.T) {
	ctx := context.Background()
	if a, b := mustName(t, ctx, ByTypeAndPayload, asynq.NewTask("a", nil)), mustName(t, ctx, ByTypeAndPayload, asynq.NewTask("a", []byte{})); a != b {
		t.Errorf("nil %s, empty %s", a, b)
	}
}

func TestNameDependsOnWhatTheKeySaysAndNothingElse(t *testing.T) {
	task := func(taskType, payload, tenant string) *asynq.Task {
		return asynq.NewTaskWithHeaders(taskType, []byte(payload), map[string]string{"tenant": tenant})
	}
	base := task("report", `{"a":1,"b":1}`, "7")
	for _, c := range []struct {
		name  string
		key   KeyFunc
		other *asynq.Task
		same  bool
	}{
		{"ByTypeAndPayload, headers differ", ByTypeAndPayload, task("report", `{"a":1,"b":1}`, "8"), true},
		{"ByTypeAndPayload, payload differs", ByTypeAndPayload, task("report", `{"b":1,"a":1}`, "7"), false},
		{"ByTypeAndPayload, type differs", ByTypeAndPayload, task("import", `{"a":1,"b":1}`, "7"), false},
		{"ByTypeAndPayload, a byte moved", ByTypeAndPayload, task("report{", `"a":1,"b":1}`, "7"), false},
		{"ByType, payload differs", ByType, task("report", "", "8"), true},
		{"ByType, type differs", ByType, task("import", `{"a":1,"b":1}`, "7"), false},
		{"ByHeader, payload differs", ByHeader("tenant"), task("report", "", "7"), true},
		{"ByHeader, header differs", ByHeader("tenant"), task("report", `{"a":1,"b":1}`, "8"), false},
		{"ByHeader, type differs", ByHeader("tenant"), task("import", `{"a":1,"b":1}`, "7"), false},
		{"ByJSON field, other field differs", ByJSON("a"), task("report", `{"a":1,"b":2}`, "8"), true},
		{"ByJSON field, field differs", ByJSON("a"), task("report", `{"a":2,"b":1}`, "7"), false},
		{"ByJSON field, type differs", ByJSON("a"), task("import", `{"a":1,"b":1}`, "7"), false},
		{"ByJSON whole, type differs", ByJSON(), task("import", `{"a":1,"b":1}`, "7"), false},
	} {
		ctx := context.Background()
		a, b := mustName(t, ctx, c.key, base), mustName(t, ctx, c.key, c.other)
		if (a == b) != c.same {
			t.Errorf("%s: %s and %s", c.name, a, b)
		}
	}
}

func TestJSONKeyIgnoresOrderWhiteSpaceAndSpelling(t *testing.T) {
	for _, c := range []struct {
		name      string
		spellings []string
	}{
		{"order and white space", []string{`{"a":1,"b":{"c":[1,2],"d":3}}`, " {\t\"b\" : {\"d\":3,\r\n\"c\":[ 1 , 2 ]},\"a\":1}\n"}},
		{"zero", []string{`0`, `-0`, `0.0`, `-0.00`, `0e5`, `0E-5`, `0e+99999999999999999999`}},
		{"a hundred", []string{`100`, `1e2`, `1E+2`, `100.00`, `0.1e3`, `1000e-1`, `10e0000000000000000000000001`}},
		{"a fraction", []string{`0.015`, `1.5e-2`, `15e-3`, `0.00015E2`}},
		{"a negative", []string{`-12.5`, `-125e-1`, `-1.25e1`, `-0.125e+2`}},
		{"far up", []string{`1e99999999999999999999`, `10e99999999999999999998`, `0.1e100000000000000000000`}},
		{"far down", []string{`1e-99999999999999999999`, `0.1e-99999999999999999998`, `10e-100000000000000000000`}},
		{"at the seam", []string{`1e1000000000000000000`, `10e999999999999999999`, `0.1e1000000000000000001`}},
		{"at the seam below", []string{`1e-1000000000000000000`, `0.1e-999999999999999999`, `10e-1000000000000000001`}},
		{"escapes", []string{`"é/\"😀\n"`, `"\u00e9\/\u0022\uD83d\uDe00\u000a"`}},
		{"escapes in a name", []string{`{"é":1}`, `{"\u00E9":1}`}},
		{"backslashes before a u", []string{`"\\ud800"`, `"\u005cud800"`}},
	} {
		want := jsonName(t, ByJSON(), c.spellings[0])
		wantField := jsonName(t, ByJSON("in.field"), `{"in":{"field":`+c.spellings[0]+`}}`)
		for _, spelling := range c.spellings[1:] {
			if name := jsonName(t, ByJSON(), spelling); name != want {
				t.Errorf("%s: %s is not %s", c.name, spelling, c.spellings[0])
			}
			if name := jsonName(t, ByJSON("in.field"), `{"x":[],"in":{"y":{},"field": `+spelling+`}}`); name != wantField {
				t.Errorf("%s, as a field: %s is not %s", c.name, spelling, c.spellings[0])
			}
		}
	}
}

func TestJSONKeyTellsDifferentValuesApart(t *testing.T) {
	values := []string{
		`null`, `true`, `false`, `0`, `1`, `-1`, `10`, `0.1`, `1e10`, `1e-10`, `"0"`, `"1"`, `"null"`, `"true"`, `""`, `" "`, `"a"`, `"A"`,
		`[]`, `{}`, `[[]]`, `[{}]`, `[null]`, `[0]`, `["0"]`, `[1,2]`, `[2,1]`, `[12]`, `[1,[2]]`, `[[1],2]`, `[[1,2]]`, `["a","b"]`, `["ab"]`, `["a,b"]`,
		`{"a":null}`, `{"a":{}}`, `{"a":1}`, `{"A":1}`, `{"a":"1"}`, `{"a":1,"b":2}`, `{"a":2,"b":1}`, `{"a":{"b":2}}`, `{"":1}`,
		`9007199254740992`, `9007199254740993`, `9007199254740992.0000000000000000001`, `18446744073709551616`, `18446744073709551617`,
		`1e999999999`, `1e999999998`, `-1e999999999`, `1e-999999999`, `1e99999999999999999999`, `1e99999999999999999998`,
		`"\u0000"`, `"\ufffd"`, `"\ufeff"`, `"e\u0301"`, `"\u00e9"`,
	}
	names := map[string]string{}
	for _, value := range values {
		for _, key := range []KeyFunc{ByJSON(), ByJSON("in")} {
			name := jsonName(t, key, `{"in":`+value+`}`)
			if other, taken := names[name]; taken {
				t.Errorf("%s and %s share a name", value, other)
			}
			names[name] = value
		}
	}
}

func TestJSONKeyKeepsPathsAndValuesApart(t *testing.T) {
	const doc = `{"a":1,"b":1,"a.b":1,"a\\":{"b":1},"c":{"a":1,"d":[1]},"n":null}`
	names := map[string]string{}
	for _, paths := range [][]string{
		{}, {"a"}, {"b"}, {"a", "b"}, {"b", "a"}, {"a", "a"}, {`a\.b`}, {`a\\.b`}, {"c.a"}, {"c"}, {"c.d"}, {"n"}, {"n", "a"},
	} {
		name := jsonName(t, ByJSON(paths...), doc)
		if other, taken := names[name]; taken {
			t.Errorf("%q and %s share a name", paths, other)
		}
		names[name] = fmt.Sprintf("%q", paths)
	}
}

func TestJSONKeyIsSetWhenItIsMade(t *testing.T) {
	paths := []string{"a"}
	key := ByJSON(paths...)
	want := jsonName(t, key, `{"a":1,"b":2}`)
	paths[0] = "b"
	if jsonName(t, key, `{"a":1,"b":2}`) != want {
		t.Error("the name has changed with the caller's slice")
	}
}

func TestJSONKeyNamesTheMissingField(t *testing.T) {
	for _, c := range []struct{ name, path, payload string }{
		{"no such field", "tenant.id", `{"tenant":{"name":"` + secret + `"}}`},
		{"nothing on the way", "tenant.id", `{"` + secret + `":{"id":1}}`},
		{"a string on the way", "tenant.id", `{"tenant":"` + secret + `"}`},
		{"null on the way", "tenant.id", `{"tenant":null}`},
		{"an array on the way", "tenant.0", `{"tenant":["` + secret + `"]}`},
		{"an array in place of the document", "0", `["` + secret + `"]`},
		{"a string in place of the document", "a", `"` + secret + `"`},
		{"the dotted name only", "a.b", `{"a.b":1}`},
		{"the nested name only", `a\.b`, `{"a":{"b":1}}`},
		{"other letters", "a", `{"A":1}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := mustNotName(t, context.Background(), ByJSON("present", c.path), asynq.NewTask("report", []byte(c.payload)))
			if !strings.Contains(err.Error(), `"present"`) {
				t.Errorf("the first missing field is not named: %v", err)
			}
			err = mustNotName(t, context.Background(), ByJSON(c.path), asynq.NewTask("report", []byte(c.payload)))
			if want := fmt.Sprintf(`redislock: invalid key: field %q is missing in the payload of task type "report"`, c.path); err.Error() != want {
				t.Errorf("error %q, want %q", err, want)
			}
		})
	}
}

func TestJSONKeyRefusesWhatHasNoSingleMeaning(t *testing.T) {
	for _, c := range []struct{ name, payload, want string }{
		{"nothing", ``, "not JSON in UTF-8"},
		{"white space", " \n", "not JSON in UTF-8"},
		{"text", secret, "not JSON in UTF-8"},
		{"an open string", `"` + secret, "not JSON in UTF-8"},
		{"an open object", `{"a":1,"b":"` + secret + `"`, "not JSON in UTF-8"},
		{"two documents", `{"a":1}{"a":1}`, "not JSON in UTF-8"},
		{"text behind", `{"a":1} ` + secret, "not JSON in UTF-8"},
		{"a comma too many", `{"a":1,}`, "not JSON in UTF-8"},
		{"a byte order mark", "\ufeff{\"a\":1}", "not JSON in UTF-8"},
		{"a leading zero", `{"a":01}`, "not JSON in UTF-8"},
		{"a hexadecimal number", `{"a":0x1}`, "not JSON in UTF-8"},
		{"not a number", `{"a":NaN}`, "not JSON in UTF-8"},
		{"binary", "\x00\xff\xfe" + secret, "not JSON in UTF-8"},
		{"a string that is not UTF-8", "{\"a\":1,\"b\":\"" + secret + "\xff\"}", "not JSON in UTF-8"},
		{"a surrogate in UTF-8", "{\"a\":1,\"b\":\"\xed\xa0\x80\"}", "not JSON in UTF-8"},
		{"nested beyond measure", strings.Repeat("[", 1<<20), "not JSON in UTF-8"},
		{"nested and closed beyond measure", strings.Repeat("[", 1<<19) + strings.Repeat("]", 1<<19), "not JSON in UTF-8"},
		{"a key twice", `{"a":1,"b":2,"a":"` + secret + `"}`, "the same key twice in an object"},
		{"a key twice, the same value", `{"a":1,"` + secret + `":2,"` + secret + `":2}`, "the same key twice in an object"},
		{"a key twice, spelled differently", `{"a":1,"\u0061":1}`, "the same key twice in an object"},
		{"a key twice, deep down", `{"a":1,"b":[0,{"c":{"d":1,"d":1}}]}`, "the same key twice in an object"},
		{"a high surrogate", `{"a":1,"b":"` + secret + `\ud800"}`, "half of a surrogate pair in a string"},
		{"a low surrogate", `{"a":1,"b":"\uDC00"}`, "half of a surrogate pair in a string"},
		{"two high surrogates", `{"a":1,"b":"\ud800\ud800\udc00"}`, "half of a surrogate pair in a string"},
		{"a pair the wrong way round", `{"a":1,"b":"\udc00\ud800"}`, "half of a surrogate pair in a string"},
		{"a high surrogate before another escape", `{"a":1,"b":"\ud800\n"}`, "half of a surrogate pair in a string"},
		{"a high surrogate behind a backslash", `{"a":1,"b":"\\\ud800"}`, "half of a surrogate pair in a string"},
		{"a surrogate in a key", `{"a":1,"\ud800":1}`, "half of a surrogate pair in a string"},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, key := range []KeyFunc{ByJSON(), ByJSON("a"), PerQueue(ByJSON("a")), Shared("scope", ByJSON("a"))} {
				err := mustNotName(t, context.Background(), key, asynq.NewTask("report", []byte(c.payload)))
				if want := `redislock: invalid key: payload of task type "report": ` + c.want; err.Error() != want {
					t.Errorf("error %q, want %q", err, want)
				}
			}
		})
	}
}

func TestMalformedPathPanicsWhenTheKeyIsMade(t *testing.T) {
	for _, c := range []struct{ path, want string }{
		{``, "a name between the dots is empty"},
		{`.`, "a name between the dots is empty"},
		{`a.`, "a name between the dots is empty"},
		{`.a`, "a name between the dots is empty"},
		{`a..b`, "a name between the dots is empty"},
		{`a\`, "a backslash stands before a dot or a backslash only"},
		{`a\\\`, "a backslash stands before a dot or a backslash only"},
		{`a\b`, "a backslash stands before a dot or a backslash only"},
	} {
		text := mustPanic(t, func() { ByJSON("fine", c.path) })
		if want := fmt.Sprintf("redislock: ByJSON: path %q: %s", c.path, c.want); text != want {
			t.Errorf("panic %q, want %q", text, want)
		}
	}
}

func TestUnusableArgumentPanicsWhenTheKeyIsMade(t *testing.T) {
	for _, c := range []struct {
		want string
		make func()
	}{
		{"redislock: ByHeader: the header name is empty", func() { ByHeader("") }},
		{"redislock: PerQueue: the KeyFunc is nil", func() { PerQueue(nil) }},
		{"redislock: Shared: the scope is empty", func() { Shared("", ByType) }},
		{"redislock: Shared: the KeyFunc is nil", func() { Shared("scope", nil) }},
	} {
		if text := mustPanic(t, c.make); text != c.want {
			t.Errorf("panic %q, want %q", text, c.want)
		}
	}
}

func TestJSONKeyTakesHostilePayloads(t *testing.T) {
	const size = 1 << 20
	for _, c := range []struct{ name, payload string }{
		{"a huge exponent", `1e999999999`},
		{"a long exponent", `1e` + strings.Repeat("9", size)},
		{"a long negative exponent", `1.5e-1` + strings.Repeat("0", size)},
		{"a long number", strings.Repeat("9", size)},
		{"many zeros", `0.` + strings.Repeat("0", size) + `1`},
		{"many numbers", `[` + strings.Repeat("1,", size/16) + `1]`},
		{"many escapes", `"` + strings.Repeat(`\u0041`, size/6) + `"`},
		{"nested as deep as allowed", strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000)},
		{"objects nested as deep as allowed", strings.Repeat(`{"a":`, 9_999) + "{}" + strings.Repeat("}", 9_999)},
	} {
		t.Run(c.name, func(t *testing.T) { jsonName(t, ByJSON(), c.payload) })
	}
}

func TestExponentsAddUpAsIntegersDo(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 20_000 {
		digits := make([]byte, 1+random.IntN(24))
		for i := range digits {
			digits[i] = "0099123456789"[random.IntN(13)] // long carries
		}
		exponent := []string{"", "+", "-"}[random.IntN(3)] + string(digits)
		n := random.Int64N(2_000_001) - 1_000_000
		want, _ := new(big.Int).SetString(exponent, 10)
		want.Add(want, big.NewInt(n))
		if got := addToExponent(exponent, n); got != want.String() {
			t.Fatalf("%s + %d = %s, want %s", exponent, n, got, want)
		}
	}
}

func TestHeaderKeyNeedsTheHeader(t *testing.T) {
	for _, headers := range []map[string]string{nil, {"Tenant": secret, "other": secret}} {
		err := mustNotName(t, context.Background(), ByHeader("tenant"), asynq.NewTaskWithHeaders("report", []byte(secret), headers))
		if want := `redislock: invalid key: header "tenant" is missing in the task of type "report"`; err.Error() != want {
			t.Errorf("error %q, want %q", err, want)
		}
	}
	mustName(t, context.Background(), ByHeader("tenant"), asynq.NewTaskWithHeaders("report", nil, map[string]string{"tenant": ""}))
}

func TestTaskIDKeyTellsTasksApartAndFollowsARetry(t *testing.T) {
	first, second := handlerContext(t, "low", "id-1"), handlerContext(t, "low", "id-2")
	task := asynq.NewTask("report", []byte(secret))
	if a, b := mustName(t, first, ByTaskID, task), mustName(t, second, ByTaskID, task); a == b {
		t.Errorf("two tasks share the name %s", a)
	}
	if a, b := mustName(t, first, ByTaskID, task), mustName(t, first, ByTaskID, asynq.NewTask("report", nil)); a != b {
		t.Errorf("one task has the names %s and %s", a, b)
	}
	err := mustNotName(t, context.Background(), ByTaskID, task)
	if want := `redislock: invalid key: no task ID in the context of task type "report"`; err.Error() != want {
		t.Errorf("error %q, want %q", err, want)
	}
}

func TestPerQueueTellsQueuesApartAndNothingElse(t *testing.T) {
	low, high := handlerContext(t, "low", "id-1"), handlerContext(t, "high", "id-1")
	report, digest := asynq.NewTask("report", []byte(secret)), asynq.NewTask("digest", []byte(secret))
	own := func(context.Context, *asynq.Task) (string, error) { return "tenant-7", nil }

	for _, c := range []struct {
		name        string
		key         KeyFunc
		front       string
		acrossTypes bool
	}{
		{"ByTypeAndPayload", ByTypeAndPayload, "report:", false},
		{"ByTaskID", ByTaskID, "report:", false},
		{"Shared", Shared("scope", ByTypeAndPayload), "scope:", true},
		{"own", own, "tenant-7:", true},
		{"PerQueue", PerQueue(ByType), "report:", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			plain, name := mustName(t, low, c.key, report), mustName(t, low, PerQueue(c.key), report)
			if !regexp.MustCompile(`^` + c.front + `[0-9a-f]{32}$`).MatchString(name) {
				t.Errorf("name %s, want one digest behind %s", name, c.front)
			}
			if other := mustName(t, high, PerQueue(c.key), report); name == other || name == plain || other == plain {
				t.Errorf("plain %s, low %s, high %s", plain, name, other)
			}
			if again := mustName(t, low, PerQueue(c.key), report); again != name {
				t.Errorf("two names in one queue: %s and %s", name, again)
			}
			if other := mustName(t, low, PerQueue(c.key), digest); (other == name) != c.acrossTypes {
				t.Errorf("type report %s, type digest %s", name, other)
			}
			if c.name != "PerQueue" && mustName(t, high, c.key, report) != plain {
				t.Error("the plain name depends on the queue")
			}
		})
	}

	err := mustNotName(t, context.Background(), PerQueue(ByType), report)
	if want := `redislock: invalid key: no queue in the context of task type "report"`; err.Error() != want {
		t.Errorf("error %q, want %q", err, want)
	}
}

func TestSharedSpansTypesUnderOneScope(t *testing.T) {
	headers := map[string]string{"tenant": "7"}
	imports := asynq.NewTaskWithHeaders("import", []byte(`{"id":7}`), headers)
	exports := asynq.NewTaskWithHeaders("export", []byte(`{"id":7}`), headers)
	ctx := handlerContext(t, "low", "id-1")
	names := map[string]string{}
	for _, c := range []struct {
		name string
		key  KeyFunc
	}{
		{"ByTypeAndPayload", ByTypeAndPayload},
		{"ByType", ByType},
		{"ByTaskID", ByTaskID},
		{"ByJSON", ByJSON("id")},
		{"ByJSON whole", ByJSON()},
		{"ByHeader", ByHeader("tenant")},
		{"PerQueue", PerQueue(ByType)},
	} {
		a, b := mustName(t, ctx, Shared("scope", c.key), imports), mustName(t, ctx, Shared("scope", c.key), exports)
		if a != b || !strings.HasPrefix(a, "scope:") {
			t.Errorf("%s: import %s, export %s", c.name, a, b)
		}
		for who, name := range map[string]string{
			"shared":         a,
			"in other scope": mustName(t, ctx, Shared("other", c.key), imports),
			"in both scopes": mustName(t, ctx, Shared("other", Shared("scope", c.key)), imports),
			"plain import":   mustName(t, ctx, c.key, imports),
			"plain export":   mustName(t, ctx, c.key, exports),
			"type as scope":  mustName(t, ctx, Shared("import", c.key), exports),
		} {
			who = c.name + " " + who
			if other, taken := names[name]; taken {
				t.Errorf("%s and %s share the name %s", who, other, name)
			}
			names[name] = who
		}
	}
}

func TestSharedShowsAnOwnKeyTheTaskAsItIs(t *testing.T) {
	key := Shared("scope", func(_ context.Context, task *asynq.Task) (string, error) { return task.Type(), nil })
	ctx := context.Background()
	if a, b := mustName(t, ctx, key, asynq.NewTask("import", nil)), mustName(t, ctx, key, asynq.NewTask("export", nil)); a == b {
		t.Errorf("two names of an own key have become one: %s", a)
	}
}

func TestWrappedKeyKeepsItsErrorsAndItsPanics(t *testing.T) {
	task := asynq.NewTask("report", []byte(secret))
	ctx := handlerContext(t, "low", "id-1")
	for name, wrap := range map[string]func(KeyFunc) KeyFunc{
		"PerQueue": PerQueue,
		"Shared":   func(key KeyFunc) KeyFunc { return Shared("scope", key) },
	} {
		t.Run(name, func(t *testing.T) {
			for _, want := range []error{NoLock, asynq.SkipRetry, errors.New("own")} {
				name, err := wrap(func(context.Context, *asynq.Task) (string, error) { return "ignored", want })(ctx, task)
				if err != want || name != "" {
					t.Errorf("name %q, error %v; want error %v itself", name, err, want)
				}
			}
			err := mustNotName(t, ctx, wrap(func(context.Context, *asynq.Task) (string, error) { return "", nil }), task)
			if want := `redislock: invalid key: the lock name of task type "report" is empty`; err.Error() != want {
				t.Errorf("error %q, want %q", err, want)
			}
			text := mustPanic(t, func() {
				_, _ = wrap(func(context.Context, *asynq.Task) (string, error) { panic("own") })(ctx, task)
			})
			if text != "own" {
				t.Errorf("panic %q, want %q", text, "own")
			}
		})
	}
}

func TestDigestTellsPartsAndLabelsApart(t *testing.T) {
	names := map[string]string{}
	for _, parts := range [][]string{
		{"l"}, {"l", ""}, {"l", "", ""}, {"l", "ab"}, {"l", "a", "b"}, {"l", "", "ab"}, {"l", "ab", ""}, {"l", "b", "a"}, {"l", "a b"},
		{"l", "\x01a\x01b"}, {"la", "b"}, {"lab"}, {"l:", "ab"}, {"", "lab"}, {"", "l", "ab"}, {"l", strings.Repeat("a", 127)}, {"l", strings.Repeat("a", 128)},
	} {
		name := Digest(parts[0], parts[1:]...)
		if !regexp.MustCompile(`^` + parts[0] + `:[0-9a-f]{32}$`).MatchString(name) {
			t.Errorf("Digest of %q is %q", parts, name)
		}
		if other, taken := names[name]; taken {
			t.Errorf("%q and %s share a name", parts, other)
		}
		names[name] = fmt.Sprintf("%q", parts)
	}
	if name := Digest("l", secret); strings.Contains(name, secret) {
		t.Errorf("the name shows the part: %s", name)
	}
}

func TestDigestCannotMakeAReadyMadeName(t *testing.T) {
	ctx := context.Background()
	task := asynq.NewTask("report", []byte("x"))
	for _, parts := range [][]string{{}, {"x"}, {"report"}, {"report", "x"}, {"ByType", "report"}, {"ByTypeAndPayload", "report", "x"}} {
		name := Digest("report", parts...)
		if name == mustName(t, ctx, ByType, task) || name == mustName(t, ctx, ByTypeAndPayload, task) {
			t.Errorf("Digest of %q is a ready-made name", parts)
		}
	}
}

func TestLockNameKeepsAFitNameAndDigestsAnyOther(t *testing.T) {
	for _, c := range []struct {
		name, in string
		kept     bool
	}{
		{"a word", "report", true},
		{"colons and spaces", "report: nightly / 7", true},
		{"unicode", "отчёт 報告 😀", true},
		{"a ready-made name", Digest("report", "x"), true},
		{"200 bytes", strings.Repeat("n", 200), true},
		{"201 bytes", strings.Repeat("n", 201), false},
		{"200 bytes and a bit in runes", strings.Repeat("é", 101), false},
		{"an opening brace", "a{b", false},
		{"a closing brace", "}", false},
		{"a line feed", "a\nb", false},
		{"NUL", "\x00", false},
		{"DEL", "a\x7f", false},
		{"a C1 control", "a\u0085b", false},
		{"invalid UTF-8", "a\xff", false},
		{"a surrogate", "\xed\xa0\x80", false},
	} {
		name, err := lockName(c.in)
		if err != nil || (name == c.in) != c.kept {
			t.Errorf("%s: %q, %v", c.name, name, err)
		}
		if !c.kept && !regexp.MustCompile(`^digest:[0-9a-f]{32}$`).MatchString(name) {
			t.Errorf("%s: name %q", c.name, name)
		}
		checkLockName(t, c.in)
	}
	if name, err := lockName(""); name != "" || !errors.Is(err, ErrInvalidKey) {
		t.Errorf("the empty name: %q, %v", name, err)
	}
}

// unfitText is what no lock name may have in it.
var unfitText = regexp.MustCompile(`[{}\x00-\x1f\x7f-\x{9f}]`)

// checkLockName checks what the rest of the package relies on: any name but the empty one is usable, and stays as it is.
func checkLockName(t testing.TB, in string) string {
	t.Helper()
	name, err := lockName(in)
	if err != nil {
		t.Fatalf("lock name of %q: %v", in, err)
	}
	if name == "" || len(name) > 200 || !utf8.ValidString(name) || unfitText.MatchString(name) {
		t.Fatalf("lock name of %q is %q", in, name)
	}
	if again, err := lockName(name); err != nil || again != name {
		t.Fatalf("lock name of the lock name %q is %q, %v", name, again, err)
	}
	// What Redis Cluster hashes: from the first { to the next }, if that is anything.
	_, behind, _ := strings.Cut("redislock:{"+name+"}:fence", "{")
	if slot, _, ok := strings.Cut(behind, "}"); !ok || slot != name {
		t.Fatalf("the slot of %q is that of %q", name, slot)
	}
	return name
}

func FuzzLockName(f *testing.F) {
	for _, name := range []string{"report", "{", "}{", "\x00", "\x7f", "\u0085", "\xff", strings.Repeat("é", 100), strings.Repeat("n", 201), "digest:"} {
		f.Add(name, "report:"+name)
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		if a == "" || b == "" {
			return
		}
		if nameA, nameB := checkLockName(t, a), checkLockName(t, b); nameA == nameB && a != b {
			// One may be the digest of the other, written by hand.
			if nameA != a && nameB != b {
				t.Errorf("%q and %q share the name %q", a, b, nameA)
			}
		}
	})
}

func FuzzNoTwoTasksShareAName(f *testing.F) {
	f.Add("report", []byte("x"), "report", []byte("y"))
	f.Add("report", []byte("x"), "reportx", []byte(nil))
	f.Add("a{b}", []byte(`{"a":1}`), "a{b}", []byte(`{"a":2}`))
	f.Add("l\x06report", []byte("\x01\x02"), "report", []byte(strings.Repeat("a", 300)))
	f.Add(strings.Repeat("long", 100), []byte("x"), strings.Repeat("long", 101), []byte("x"))
	f.Fuzz(func(t *testing.T, typeA string, payloadA []byte, typeB string, payloadB []byte) {
		ctx := context.Background()
		names := map[string]string{} // lock name to identity
		add := func(name string, identity ...string) {
			name = checkLockName(t, name)
			id := fmt.Sprintf("%q", identity)
			if other, taken := names[name]; taken && other != id {
				t.Fatalf("%s and %s share the name %q", id, other, name)
			}
			names[name] = id
		}
		for _, one := range []struct {
			taskType string
			payload  []byte
		}{{typeA, payloadA}, {typeB, payloadB}} {
			taskType, payload := one.taskType, string(one.payload)
			task := asynq.NewTaskWithHeaders(taskType, one.payload, map[string]string{"h": payload, "i": payload})
			add(mustName(t, ctx, ByTypeAndPayload, task), "ByTypeAndPayload", taskType, payload)
			add(mustName(t, ctx, ByType, task), "ByType", taskType)
			add(mustName(t, ctx, ByHeader("h"), task), "ByHeader h", taskType, payload)
			add(mustName(t, ctx, ByHeader("i"), task), "ByHeader i", taskType, payload)
			add(mustName(t, ctx, Shared("s", ByTypeAndPayload), task), "Shared s ByTypeAndPayload", payload)
			add(mustName(t, ctx, Shared("s", ByHeader("h")), task), "Shared s ByHeader h", payload)
			if taskType != "" {
				add(mustName(t, ctx, Shared(taskType, ByTypeAndPayload), task), "Shared "+taskType+" ByTypeAndPayload", payload)
			}
			add(Digest(taskType), "Digest", taskType)
			add(Digest(taskType, payload), "Digest", taskType, payload)
			add(Digest(taskType, taskType, payload), "Digest", taskType, taskType, payload)
			for i, key := range []KeyFunc{ByJSON(), ByJSON("a")} { // which documents are equal: see FuzzCanonicalJSON
				if name, err := key(ctx, task); err == nil {
					add(name, "ByJSON", strconv.Itoa(i), taskType)
				}
			}
		}
	})
}

func FuzzCanonicalJSON(f *testing.F) {
	for _, doc := range []string{
		`null`, `{"a":1,"b":[true,false,null,"x"]}`, `-12.50e+3`, `1e999`, `1e99999999999999999999`, `"\ud83d\ude00\\\"é"`, `[[],{},[{}]]`, `{"":{"":0}}`, `{"a":1,"a":2}`, `"\ud800"`,
	} {
		f.Add(doc, `[0.10, "\u0041", {"b":2e1, "a":-0}]`, uint64(len(doc)))
	}
	f.Fuzz(func(t *testing.T, a, b string, seed uint64) {
		random := rand.New(rand.NewPCG(seed, seed))
		task := func(doc string) *asynq.Task { return asynq.NewTask("report", []byte(doc)) }
		nameA, err := ByJSON()(context.Background(), task(a))
		if err != nil {
			if !errors.Is(err, ErrInvalidKey) {
				t.Fatal(err)
			}
			return
		}
		valueA := decodeJSON(t, a)
		other := respellJSON(random, valueA)
		if name := mustName(t, context.Background(), ByJSON(), task(other)); name != nameA {
			t.Fatalf("%s is not %s", other, a)
		}
		if name := mustName(t, context.Background(), ByJSON("in", `b\.c`), task(`{"b.c":`+other+`,"in":`+a+`}`)); name !=
			mustName(t, context.Background(), ByJSON("in", `b\.c`), task(`{"in":`+other+`,"b.c": `+a+`}`)) {
			t.Fatalf("%s is not %s, as fields", other, a)
		}

		for _, doc := range []string{b, respellJSON(random, alteredJSON(random, valueA))} {
			nameB, err := ByJSON()(context.Background(), task(doc))
			if err != nil {
				continue
			}
			if same, known := equalJSON(valueA, decodeJSON(t, doc)); known && same != (nameA == nameB) {
				t.Fatalf("%s and %s: equal %t, names %s and %s", a, doc, same, nameA, nameB)
			}
		}
	})
}

// decodeJSON reads a document as encoding/json does.
func decodeJSON(t *testing.T, doc string) (value any) {
	t.Helper()
	decoder := json.NewDecoder(strings.NewReader(doc))
	decoder.UseNumber()
	if err := decoder.Decode(&value); err != nil {
		t.Fatalf("%q: %v", doc, err)
	}
	return value
}

// respellJSON writes a value in another way.
func respellJSON(random *rand.Rand, value any) string {
	space := func() string { return []string{"", "", " ", "\n", "\t\r"}[random.IntN(5)] }
	var text string
	switch value := value.(type) {
	case nil:
		text = "null"
	case bool:
		text = strconv.FormatBool(value)
	case string:
		var b strings.Builder
		for _, r := range value {
			switch {
			case r < ' ' || r == '"' || r == '\\' || random.IntN(2) == 0:
				for _, unit := range utf16.Encode([]rune{r}) {
					fmt.Fprintf(&b, []string{`\u%04x`, `\u%04X`}[random.IntN(2)], unit)
				}
			default:
				b.WriteRune(r)
			}
		}
		text = `"` + b.String() + `"`
	case json.Number:
		mantissa, exponent, _ := strings.Cut(strings.ToLower(string(value)), "e")
		power, err := strconv.Atoi("0" + strings.TrimPrefix(exponent, "+"))
		if negative, ok := strings.CutPrefix(exponent, "-"); ok {
			power, err = strconv.Atoi(negative)
			power = -power
		}
		zeros := random.IntN(4)
		switch {
		case err != nil || power > 1e15 || power < -1e15:
			text = mantissa + "E" + exponent
		case strings.Contains(mantissa, "."):
			text = mantissa + strings.Repeat("0", zeros) + "E" + strconv.Itoa(power)
		case strings.Trim(mantissa, "-0") == "":
			text = "-0.0e" + strconv.Itoa(zeros)
		default:
			text = mantissa + strings.Repeat("0", zeros) + ".0e" + strconv.Itoa(power-zeros)
		}
	case []any:
		var parts []string
		for _, element := range value {
			parts = append(parts, respellJSON(random, element))
		}
		text = "[" + space() + strings.Join(parts, ",") + "]"
	case map[string]any:
		var parts []string
		for name, element := range value { // in Go's random order
			parts = append(parts, respellJSON(random, name)+":"+respellJSON(random, element))
		}
		text = "{" + space() + strings.Join(parts, ",") + "}"
	}
	return space() + text + space()
}

// alteredJSON is a copy of a value with some difference in it, most of the time.
func alteredJSON(random *rand.Rand, value any) any {
	switch value := value.(type) {
	case bool:
		return !value
	case string:
		return value + string(rune('0'+random.IntN(4)))
	case json.Number:
		if random.IntN(2) == 0 {
			return "-" + strings.TrimPrefix(string(value), "-")
		}
		return json.Number(strings.TrimSpace(respellJSON(random, value)))
	case []any:
		value = slices.Clone(value)
		if len(value) == 0 || random.IntN(3) == 0 {
			return append(value, json.Number("0"))
		}
		i := random.IntN(len(value))
		value[i] = alteredJSON(random, value[i])
		return value
	case map[string]any:
		copied := map[string]any{}
		for name, element := range value {
			if random.IntN(2) == 0 {
				element = alteredJSON(random, element)
			}
			copied[name] = element
		}
		if len(copied) == 0 {
			copied[""] = nil
		}
		return copied
	default:
		return false
	}
}

// equalJSON reports whether two decoded values are the same, by another way than the package's. It does not know for numbers that
// are too long to write out.
func equalJSON(a, b any) (same, known bool) {
	switch a := a.(type) {
	case json.Number:
		b, ok := b.(json.Number)
		if !ok {
			return false, true
		}
		for _, number := range []string{string(a), string(b)} {
			_, exponent, _ := strings.Cut(strings.ToLower(number), "e")
			if n, err := strconv.Atoi(exponent); exponent != "" && (err != nil || n > 1000 || n < -1000) {
				return false, false
			}
		}
		x, _ := new(big.Rat).SetString(string(a))
		y, _ := new(big.Rat).SetString(string(b))
		return x.Cmp(y) == 0, true
	case []any:
		b, ok := b.([]any)
		if !ok || len(a) != len(b) {
			return false, true
		}
		for i := range a {
			if same, known := equalJSON(a[i], b[i]); !same {
				return false, known
			}
		}
		return true, true
	case map[string]any:
		b, ok := b.(map[string]any)
		if !ok || len(a) != len(b) {
			return false, true
		}
		known := true
		for name := range a {
			other, ok := b[name]
			if !ok {
				return false, true
			}
			switch same, sure := equalJSON(a[name], other); {
			case !sure:
				known = false
			case !same:
				return false, true
			}
		}
		return known, known
	default:
		switch b.(type) {
		case []any, map[string]any:
			return false, true
		}
		return a == b, true
	}
}

func BenchmarkByTypeAndPayload(b *testing.B) {
	for _, size := range []int{0, 100, 10 << 10, 1 << 20} {
		b.Run(strconv.Itoa(size), func(b *testing.B) {
			task := asynq.NewTask("report:nightly", bytes.Repeat([]byte("x"), size))
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				_, _ = ByTypeAndPayload(b.Context(), task)
			}
		})
	}
}

func BenchmarkByJSON(b *testing.B) {
	doc := []byte(`{"tenant":{"id":4711,"name":"Example"},"date":"2025-06-01","pages":[1,2,3,4],"final":true}`)
	for _, c := range []struct {
		name string
		key  KeyFunc
	}{
		{"whole", ByJSON()},
		{"fields", ByJSON("tenant.id", "date")},
	} {
		b.Run(c.name, func(b *testing.B) {
			task := asynq.NewTask("report:nightly", doc)
			b.SetBytes(int64(len(doc)))
			b.ReportAllocs()
			for b.Loop() {
				_, _ = c.key(b.Context(), task)
			}
		})
	}
}
