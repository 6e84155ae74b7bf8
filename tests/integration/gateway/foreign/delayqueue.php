<?php

// Runs tests of ouqiang's own client. Their own set-up names port 9277; of PHPUnit and Guzzle, what the client
// and its tests use.

namespace GuzzleHttp {
    class Response
    {
        public function __construct(private string $body) {}

        public function json() { return json_decode($this->body, true, 512, JSON_THROW_ON_ERROR); }
    }

    class Client
    {
        public function __construct(private array $config) {}

        public function post($path, array $options)
        {
            $url = $this->config['base_url'] . $path;
            $body = file_get_contents($url, false, stream_context_create(['http' => [
                'method' => 'POST',
                'header' => "Content-Type: application/json\r\nConnection: close",
                'content' => json_encode($options['json']),
                'timeout' => $this->config['defaults']['timeout'],
                'protocol_version' => 1.1,
            ]]));
            if ($body === false) {
                throw new \Exception("no answer to $path");
            }
            return new Response($body);
        }
    }
}

namespace {
    abstract class PHPUnit_Framework_TestCase
    {
        private $expected;

        protected function setUp() {}

        protected function setExpectedException($name) { $this->expected = $name; }

        protected function assertEquals($expected, $actual)
        {
            if ($expected != $actual) {
                throw new \Exception(var_export($actual, true) . ' is not ' . var_export($expected, true));
            }
        }

        protected function assertArrayHasKey($key, $array)
        {
            $this->assertEquals(true, array_key_exists($key, $array));
        }

        protected function assertJsonStringEqualsJsonString($expected, $actual)
        {
            $this->assertEquals(json_decode($expected, true), json_decode($actual, true));
        }

        public function runTestOf($name)
        {
            $comment = (new \ReflectionMethod($this, $name))->getDocComment() ?: '';
            foreach (str_contains($comment, '@dataProvider') ? $this->providerJob() : [[]] as $arguments) {
                $this->setUp();
                $caught = null;
                try {
                    $this->$name(...$arguments);
                } catch (\Exception $exception) {
                    if ($this->expected === null) {
                        throw $exception;
                    }
                    $caught = $exception;
                }
                if ($this->expected !== null && !$caught instanceof $this->expected) {
                    throw new \Exception("$name did not raise $this->expected");
                }
                $this->expected = null;
            }
        }
    }

    error_reporting(E_ALL & ~E_DEPRECATED);
    [, $source, $port] = $argv;
    spl_autoload_register(function ($class) use ($source) {
        $path = str_starts_with($class, 'DelayQueue\\Tests\\')
            ? 'tests/' . substr($class, strlen('DelayQueue\\Tests\\'))
            : 'src/' . substr($class, strlen('DelayQueue\\'));
        $file = "$source/" . str_replace('\\', '/', $path) . '.php';
        if (is_file($file)) {
            require $file;
        }
    });

    class DelayQueueTest extends \DelayQueue\Tests\DelayQueueTest
    {
        protected function setUp()
        {
            $this->delayQueue = new \DelayQueue\DelayQueue("http://127.0.0.1:{$GLOBALS['port']}");
        }
    }

    class JobTest extends \DelayQueue\Tests\JobTest {}

    foreach (array_slice($argv, 3) as $test) {
        [$class, $name] = explode('::', $test);
        (new $class)->runTestOf($name);
        echo "passed $test\n";
    }
}
